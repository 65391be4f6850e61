//! Values that Transformers produced in float32: the trunk, the tokenizer and the scores must meet them.
//!
//! `RIGHT_RESET_GOLDEN` names another folder of checkpoint folders to try.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod common;

use std::path::{Path, PathBuf};

use right_reset::model::ops::{Device, HeadScratch, Precision};
use right_reset::model::{self, Batch, Encoder, EncoderScratch, Load, Scratch, Tap, Trunk};
use right_reset::score::{
    Comparator, Document, EdgeCurves, Engine, EngineOptions, Knots, Passive, PassiveScratch, Positions, Prefix, Readout, Readouts,
    ScoreSpec, Stage, kept_positions, reach, score_at,
};
use safetensors::SafeTensors;
use serde_json::Value;

const ALL: Load = Load { depth: usize::MAX, extra: 64, head: true, device: Device::Cpu, precision: Precision::F32 };

fn spec(readouts: Readouts, window: u32, positions: Positions) -> ScoreSpec {
    ScoreSpec { stages: Vec::new(), window, skip: 1, readouts, positions, prefix: Prefix::Tokens(vec![]), bos: None, context: 8192 }
}

fn options(threads: usize, batch_tokens: usize) -> EngineOptions {
    EngineOptions { threads, batch_tokens, stage_memory: 1 << 30 }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

/// Norm of the difference over norm of the reference, the largest over tokens.
fn distance(found: &[f32], expected: &SafeTensors, name: &str) -> f64 {
    let view = expected.tensor(name).unwrap();
    let hidden = view.shape()[1];
    let reference: Vec<f32> = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(found.len(), reference.len(), "{name}");
    let norm = |v: Vec<f64>| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    found
        .chunks(hidden)
        .zip(reference.chunks(hidden))
        .map(|(f, r)| {
            let difference = norm(f.iter().zip(r).map(|(a, b)| f64::from(a - b)).collect());
            difference / norm(r.iter().map(|&x| f64::from(x)).collect()).max(1e-30)
        })
        .fold(0.0, f64::max)
}

fn check_architecture(dir: &Path) {
    let name = dir.display();
    let trunk = model::load_trunk(dir, ALL).unwrap_or_else(|e| panic!("{name} cannot be loaded: {e}"));
    let expected: Value = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let bytes = std::fs::read(dir.join("expected.safetensors")).unwrap();
    let states = SafeTensors::deserialize(&bytes).unwrap();
    let ids: Vec<u32> = expected["ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
    let (window, layers) = (expected["W"].as_u64().unwrap() as u32, expected["layers"].as_u64().unwrap() as usize);
    assert_eq!(expected["s"], 1, "{name}");
    assert_eq!(trunk.shape().layers, layers, "{name}");
    let edges = expected["edges"].as_array().unwrap();
    let places: Vec<u32> = edges.iter().map(|e| e["b"].as_u64().unwrap() as u32).collect();

    // Every hidden state: one batch of the full pass and all windows, every layer tapped.
    let mut taps: Vec<Tap> = (0..=layers).map(Tap::Layer).collect();
    taps.push(Tap::Final);
    let mut batch = Batch::default();
    batch.push(ids.iter().copied().zip(0..));
    for &b in &places {
        let end = ids.len().min((b + window) as usize);
        batch.push(ids[b as usize..end].iter().copied().zip(b..));
    }
    let found = trunk.forward(&batch, &taps, &mut Scratch::default()).unwrap();
    let hidden = trunk.shape().hidden;
    let mut checked = 0;
    for (sequence, span) in batch.sequences().enumerate() {
        for (tap, rows) in taps.iter().zip(&found) {
            let what = match (sequence, tap) {
                (0, Tap::Layer(k)) => format!("full.hidden.{k}"),
                (0, Tap::Final) => "full.normed".to_owned(),
                (i, Tap::Layer(k)) => format!("reset.{}.hidden.{k}", places[i - 1]),
                (_, Tap::Final | Tap::Attention { .. }) => continue,
            };
            let off = distance(&rows[span.start * hidden..span.end * hidden], &states, &what);
            assert!(off < 1e-4, "{name}: {what} is off by {off:.2e}");
            checked += 1;
        }
        // Logits of every row.
        let head = trunk.head().unwrap();
        let mut logits = vec![0.0; span.len() * head.vocab()];
        head.logits(&found[layers + 1][span.start * hidden..span.end * hidden], &mut logits, &mut HeadScratch::default()).unwrap();
        let what = sequence.checked_sub(1).map_or("full.logits".to_owned(), |i| format!("reset.{}.logits", places[i]));
        let off = distance(&logits, &states, &what);
        assert!(off < 1e-4, "{name}: {what} is off by {off:.2e}");
    }
    assert_eq!(checked, (layers + 1) * (places.len() + 1) + 1);
    independent(&*trunk, &batch, &taps, &found, &name.to_string());

    // RR at every layer, re-indexed, and after the final norm.
    let mut settings: Vec<(Tap, Positions)> = taps.iter().map(|&t| (t, Positions::Original)).collect();
    settings.extend((0..=layers).map(|k| (Tap::Layer(k), Positions::Reindexed)));
    for (tap, positions) in settings {
        let engine = Engine::new(trunk.clone(), spec(Readouts::rr(tap), window, positions), options(1, 64)).unwrap();
        let curves = engine.score_blocking(Document { ids: ids.clone(), edges: places.clone() }).unwrap();
        for ((curve, edge), &b) in curves.iter().zip(edges).zip(&places) {
            let m = window.min(ids.len() as u32 - b);
            let reference = match (tap, positions) {
                (Tap::Final | Tap::Attention { .. }, _) => &edge["rr_final_normed"],
                (Tap::Layer(k), Positions::Original) => &edge["rr"][k.to_string()],
                (Tap::Layer(k), Positions::Reindexed) => &edge["rr_reindexed"][k.to_string()],
            };
            let off = (f64::from(score_at(Readout::Rr, &curve.rr, m, 1, window)) - number(reference)).abs();
            assert!(off < 1e-5, "{name}: RR at {b}, {tap:?}, {positions:?} is off by {off:.2e}");
        }
    }

    // LR and KL; the files hold the damage and the divergence, which scores negate.
    let readouts = Readouts { rr: None, lr: true, kl: true };
    let engine = Engine::new(trunk.clone(), spec(readouts, window, Positions::Original), options(1, 64)).unwrap();
    let curves = engine.score_blocking(Document { ids: ids.clone(), edges: places.clone() }).unwrap();
    for ((curve, edge), &b) in curves.iter().zip(edges).zip(&places) {
        let m = window.min(ids.len() as u32 - b);
        for (readout, key) in [(Readout::Lr, "lr"), (Readout::Kl, "kl")] {
            let off = (f64::from(score_at(readout, curve.get(readout), m, 1, window)) + number(&edge[key])).abs();
            assert!(off < 1e-4, "{name}: {key} at {b} is off by {off:.2e}");
        }
    }
}

/// A sequence has the same bits alone, and whatever comes after it.
fn independent(trunk: &dyn Trunk, batch: &Batch, taps: &[Tap], found: &[Vec<f32>], name: &str) {
    let hidden = trunk.shape().hidden;
    let same = |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    for span in batch.sequences() {
        let tokens = || batch.ids[span.clone()].iter().copied().zip(batch.positions[span.clone()].iter().copied());
        for padding in [0, 5] {
            let mut alone = Batch::default();
            let after = batch.positions[span.end - 1] + 1;
            alone.push(tokens().chain((0..padding).map(|i| (3 + i, after + i))));
            let states = trunk.forward(&alone, taps, &mut Scratch::default()).unwrap();
            for (alone, all) in states.iter().zip(found) {
                let rows = span.start * hidden..span.end * hidden;
                assert!(same(&alone[..rows.len()], &all[rows]), "{name}: {span:?} with {padding} tokens of padding");
            }
        }
    }
}

#[test]
fn every_state_and_score_of_the_architecture_checkpoints() {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/arch");
    let folder = std::env::var_os("RIGHT_RESET_GOLDEN").map_or(default, PathBuf::from);
    let mut tried = 0;
    for entry in std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let dir = entry.unwrap().path();
        if dir.is_dir() {
            check_architecture(&dir);
            tried += 1;
        }
    }
    assert!(tried > 0, "{} holds no checkpoint folders", folder.display());
}

#[test]
fn scores_that_remove_no_prefix() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/arch");
    for name in ["llama", "qwen2", "gpt2", "gemma4"] {
        let dir = folder.join(name);
        let read = |file: &str| -> Value { serde_json::from_slice(&std::fs::read(dir.join(file)).unwrap()).unwrap() };
        let (expected, inputs) = (read("passive.json"), read("expected.json"));
        let ids: Vec<u32> = inputs["ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
        let rows = expected["scores"].as_array().unwrap();
        let places: Vec<u32> = rows.iter().map(|r| r["b"].as_u64().unwrap() as u32).collect();
        let layer = Tap::Layer(expected["layer"].as_u64().unwrap() as usize);
        let spec = spec(Readouts::rr(layer), inputs["W"].as_u64().unwrap() as u32, Positions::Original);
        let passive = Passive::new(model::load_trunk(&dir, ALL).unwrap(), spec).unwrap();
        let which: Vec<Comparator> = Comparator::ALL.into_iter().filter(|c| c.needs_model()).collect();
        let found = passive.scores(&ids, &places, &which, &mut PassiveScratch::default()).unwrap();
        let mut checked = 0;
        for (which, scores) in which.iter().zip(&found) {
            for (score, row) in scores.iter().zip(rows) {
                match row[which.as_str()].as_f64() {
                    None => assert!(score.is_nan(), "{name}: {which:?} at {}", row["b"]),
                    Some(value) => {
                        let off = (f64::from(*score) - value).abs();
                        assert!(off < 1e-4 * value.abs().max(1.0), "{name}: {which:?} at {} is {score}, not {value}", row["b"]);
                        checked += 1;
                    }
                }
            }
        }
        assert!(checked >= 6 * rows.len(), "{name}");
    }
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
    let (ma, mb) = (mean(a), mean(b));
    let product = |x: &[f64], mx: f64, y: &[f64], my: f64| x.iter().zip(y).map(|(x, y)| (x - mx) * (y - my)).sum::<f64>();
    product(a, ma, b, mb) / (product(a, ma, a, ma) * product(b, mb, b, mb)).sqrt()
}

#[test]
fn tokens_and_scores_of_real_text_with_real_weights() {
    let path = common::model();
    let trunk = model::load_trunk(&path, ALL).unwrap();
    let rounded = [(Precision::Bf16, 0.9995), (Precision::Int8, 0.99)]
        .map(|(precision, least)| (precision, least, model::load_trunk(&path, Load { precision, ..ALL }).unwrap()));
    let tokenizer = model::load_tokenizer(&path).unwrap();
    for text in ["bees", "savings", "scripts"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/smollm2/{text}.json"));
        let golden: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let ids = tokenizer.encode(golden["text"].as_str().unwrap()).unwrap().ids;
        let expected: Vec<u32> = golden["ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
        assert_eq!(ids, expected, "{text}");

        let layer = golden["layer"].as_u64().unwrap() as usize;
        let mut batch = Batch::default();
        batch.push(ids.iter().copied().zip(0..));
        let states = trunk.forward(&batch, &[Tap::Layer(layer)], &mut Scratch::default()).unwrap().remove(0);
        for (row, first8) in golden["full_hidden_rows"].as_array().unwrap().iter().zip(golden["full_hidden_first8"].as_array().unwrap()) {
            let at = row.as_u64().unwrap() as usize * trunk.shape().hidden;
            for (found, value) in states[at..at + 8].iter().zip(first8.as_array().unwrap()) {
                assert!((f64::from(*found) - number(value)).abs() < 0.01, "{text}: state {row}");
            }
        }

        let edges = golden["edges"].as_array().unwrap();
        let places: Vec<u32> = edges.iter().map(|e| e["b"].as_u64().unwrap() as u32).collect();
        let readouts = Readouts { rr: Some(Tap::Layer(layer)), lr: true, kl: true };
        let engine = Engine::new(trunk.clone(), spec(readouts, 24, Positions::Original), options(2, 2048)).unwrap();
        let curves = engine.score_blocking(Document { ids: ids.clone(), edges: places.clone() }).unwrap();
        let (mut worst, mut worst_head, mut damages) = (0.0_f64, 0.0_f64, 0);
        for ((curve, edge), &b) in curves.iter().zip(edges).zip(&places) {
            let m = 24.min(ids.len() as u32 - b);
            assert_eq!(u64::from(m), edge["m"].as_u64().unwrap());
            for (readout, key, sign) in [(Readout::Rr, "rr", 1.0), (Readout::Lr, "lr", -1.0), (Readout::Kl, "kl", -1.0)] {
                let found = sign * f64::from(score_at(readout, curve.get(readout), m, 1, 24));
                if edge[key].is_null() {
                    assert!(found.is_nan(), "{text}: {key} at {b}");
                    continue;
                }
                let off = (found - number(&edge[key])).abs();
                match readout {
                    Readout::Rr => worst = worst.max(off),
                    _ => {
                        assert!(off < 2e-3_f64.max(2e-4 * number(&edge[key]).abs()), "{text}: {key} at {b} is off by {off:.2e}");
                        worst_head = worst_head.max(off);
                    }
                }
            }
        }
        assert!(worst < 2e-4, "{text}: RR is off by {worst:.2e}");

        // Rounded products: nearly the same order of edges.
        for (precision, least, rounded) in &rounded {
            let engine = Engine::new(rounded.clone(), spec(readouts, 24, Positions::Original), options(2, 2048)).unwrap();
            let again = engine.score_blocking(Document { ids: ids.clone(), edges: places.clone() }).unwrap();
            for readout in [Readout::Rr, Readout::Lr] {
                let scores = |curves: &[EdgeCurves]| -> Vec<f64> {
                    let own = curves.iter().zip(&places).map(|(c, &b)| (c, 24.min(ids.len() as u32 - b)));
                    own.map(|(c, m)| f64::from(score_at(readout, c.get(readout), m, 1, 24))).filter(|s| !s.is_nan()).collect()
                };
                let found = correlation(&scores(&curves), &scores(&again));
                let what = format!("{text}: {} in {} correlates {found:.6}", readout.as_str(), precision.as_str());
                assert!(found > *least && found < 1.0 - 1e-9, "{what}");
                println!("{what}");
            }
        }
        println!("{text}: {} edges, RR off by at most {worst:.2e}, LR and KL by {worst_head:.2e} nats", edges.len());

        // Damages over longer stretches, without a prefix and with the token that parted documents in training.
        let document_token = golden["document_token"].as_u64().unwrap() as u32;
        for (key, prefix) in [("none", vec![]), ("document", vec![document_token])] {
            let readouts = Readouts { rr: None, lr: true, kl: false };
            let spec = ScoreSpec { prefix: Prefix::Tokens(prefix), ..spec(readouts, 96, Positions::Original) };
            let curves = Engine::new(trunk.clone(), spec, options(2, 2048)).unwrap();
            let some: Vec<u32> = places.iter().copied().step_by(4).collect();
            let curves = curves.score_blocking(Document { ids: ids.clone(), edges: some.clone() }).unwrap();
            let (mut worst_first, mut worst_rest) = (0.0_f64, 0.0_f64);
            for ((curve, edge), &b) in curves.iter().zip(edges.iter().step_by(4)).zip(&some) {
                let m = 96.min(ids.len() as u32 - b);
                let mut first = None;
                for horizon in [8, 24, 48, 96] {
                    let at = kept_positions(m, 1).position(|tokens| tokens == horizon.min(m));
                    let Some(&found) = at.and_then(|at| curve.lr.get(at)) else { continue };
                    let off = f64::from(found) - number(&edge["damage"][key][horizon.to_string()]);
                    worst_rest = worst_rest.max((off - *first.get_or_insert(off)).abs());
                    damages += 1;
                }
                worst_first = worst_first.max(first.unwrap_or(0.0).abs());
            }
            // The token behind the document token can be one that no f32 arithmetic gets closer: see `make_damage.py`.
            let most_first = if key == "document" { 1.2e-2 } else { 1e-3 };
            let what = format!("{text}: damage {key} is off by {worst_first:.2e} over 8 tokens, {worst_rest:.2e} over those behind them");
            assert!(worst_first < most_first && worst_rest < 1e-3, "{what}");
            println!("{what}");
        }
        assert!(damages > edges.len() / 2, "{text}: damages were compared");
    }
}

#[test]
fn gguf_files_hold_the_same_models() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in ["llama", "qwen2", "qwen3", "gpt2"] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/arch").join(architecture);
        let path = folder.path().join(format!("{architecture}.gguf"));
        common::write_gguf(&dir, &path, &[]);

        let mut batch = Batch::default();
        batch.push((3..40).zip(0..));
        let states = |path: &Path| {
            let trunk = model::load_trunk(path, ALL).unwrap_or_else(|e| panic!("{architecture}: {e}"));
            let states = trunk.forward(&batch, &[Tap::Layer(2), Tap::Final], &mut Scratch::default()).unwrap();
            let mut logits = vec![0.0; batch.ids.len() * trunk.shape().vocab];
            trunk.head().unwrap().logits(&states[1], &mut logits, &mut HeadScratch::default()).unwrap();
            (states, logits)
        };
        assert!(states(&path) == states(&dir), "{architecture}: the GGUF file gives other states than the hub directory");
    }
}

#[test]
fn answers_are_the_likeliest_tokens_of_full_passes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.gguf");
    common::write_tiny_chat(&path, 4096);
    let (trunk, tokenizer) = (model::load_trunk(&path, ALL).unwrap(), model::load_tokenizer(&path).unwrap());
    let chat = model::Chat::open(&path).unwrap();
    let question = "What stands before the <s> and after the bread?";
    let (answer, tokens) = chat.answer(question, 24).unwrap();

    // What a document says of special tokens is text.
    let plain = tokenizer.without_special_tokens().encode(question).unwrap().ids;
    assert!(!plain.contains(&1) && tokenizer.encode(question).unwrap().ids.contains(&1));
    assert_eq!(tokenizer.decode(&plain).unwrap(), question);
    let (before, after) = (tokenizer.encode("<s>user: ").unwrap().ids, tokenizer.encode("\nanswer:").unwrap().ids);
    assert_eq!(before[0], 1);
    let mut ids = [before.clone(), plain, after].concat();
    let prompt = ids.len();
    while ids.len() < prompt + 24 {
        let mut batch = Batch::default();
        batch.push(ids.iter().copied().zip(0..));
        let states = trunk.forward(&batch, &[Tap::Final], &mut Scratch::default()).unwrap().remove(0);
        let mut logits = vec![0.0; trunk.shape().vocab];
        let last = &states[states.len() - trunk.shape().hidden..];
        trunk.head().unwrap().logits(last, &mut logits, &mut HeadScratch::default()).unwrap();
        let next = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as u32;
        if next == 0 {
            break;
        }
        ids.push(next);
    }
    assert_eq!((answer, tokens), (tokenizer.decode(&ids[prompt..]).unwrap(), ids.len() - before.len()));

    let error = chat.answer(&"and so on ".repeat(2000), 24).unwrap_err().to_string();
    assert!(error.contains("is outside the 4096 positions of the model"), "{error}");
    let refused = |path: &Path| model::Chat::open(path).err().unwrap().to_string();
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/arch/gpt2");
    assert!(refused(&dir).contains("a hub directory; answers are generated by GGUF files"));
    common::write_gguf(&dir, &path, &[]);
    assert!(refused(&path).contains("its architecture is \"gpt2\""));
    common::write_gguf(&dir.with_file_name("llama"), &path, &[]);
    assert!(refused(&path).contains("it is no instruction model"));
}

#[test]
fn the_default_model_answers() {
    let chat = model::Chat::open(&common::model()).unwrap();
    // In float32 the likeliest token leads by 1.7 and more: eight bits change nothing.
    let (answer, _) = chat.answer("Repeat after me: the bread is warm.", 24).unwrap();
    assert_eq!(answer, "The bread is warm.");
}

#[test]
fn shards_prefixes_and_half_precision_load() {
    use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/arch/qwen3");
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    let mut batch = Batch::default();
    batch.push((3..30).zip(0..));
    let states = |path: &Path| {
        let trunk = model::load_trunk(path, ALL).unwrap_or_else(|e| panic!("{e}"));
        trunk.forward(&batch, &[Tap::Final], &mut Scratch::default()).unwrap().remove(0)
    };
    // The same numbers in f32, in one file, and in half precision, in two files of a larger model's language part.
    for dtype in [Dtype::BF16, Dtype::F16] {
        let rounded = |v: f32| match dtype {
            Dtype::BF16 => half::bf16::from_f32(v).to_f32(),
            _ => half::f16::from_f32(v).to_f32(),
        };
        let stored = |v: f32| match dtype {
            Dtype::BF16 => half::bf16::from_f32(v).to_le_bytes(),
            _ => half::f16::from_f32(v).to_le_bytes(),
        };
        let (plain, sharded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut whole, mut shards, mut index) = (Vec::new(), [Vec::new(), Vec::new()], serde_json::Map::new());
        for (i, (name, view)) in tensors.tensors().into_iter().enumerate() {
            let values: Vec<f32> = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            let full: Vec<u8> = values.iter().flat_map(|v| rounded(*v).to_le_bytes()).collect();
            let half: Vec<u8> = values.iter().flat_map(|v| stored(*v)).collect();
            let nested = name.replacen("model.", "model.language_model.", 1);
            index.insert(nested.clone(), format!("model-0000{}-of-00002.safetensors", i % 2 + 1).into());
            whole.push((name, full, view.shape().to_vec()));
            shards[i % 2].push((nested, half, view.shape().to_vec()));
        }
        let write = |dir: &Path, file: &str, tensors: &[(String, Vec<u8>, Vec<usize>)], dtype: Dtype| {
            let views = tensors.iter().map(|(name, data, shape)| (name, TensorView::new(dtype, shape.clone(), data).unwrap()));
            serialize_to_file(views, None, &dir.join(file)).unwrap();
        };
        write(plain.path(), "model.safetensors", &whole, Dtype::F32);
        std::fs::write(plain.path().join("config.json"), config.to_string()).unwrap();
        for (i, shard) in shards.iter().enumerate() {
            write(sharded.path(), &format!("model-0000{}-of-00002.safetensors", i + 1), shard, dtype);
        }
        let outer = serde_json::json!({ "model_type": "sees-and-reads", "text_config": config });
        std::fs::write(sharded.path().join("config.json"), outer.to_string()).unwrap();
        let index = serde_json::json!({ "weight_map": index });
        std::fs::write(sharded.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        assert!(states(sharded.path()) == states(plain.path()), "{dtype:?}");
    }
}

#[test]
fn embeddings_equal_those_of_transformers_by_every_pooling_alone_and_in_company() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/encoder");
    let expected: Value = serde_json::from_slice(&std::fs::read(source.join("expected.json")).unwrap()).unwrap();
    let texts: Vec<&str> = expected.as_array().unwrap().iter().map(|e| e["text"].as_str().unwrap()).collect();
    let place = tempfile::tempdir().unwrap();
    let folder = |pooling: &str| {
        let dir = place.path().join(blake3::hash(pooling.as_bytes()).to_hex().as_str());
        std::fs::create_dir_all(dir.join("1_Pooling")).unwrap();
        for name in ["config.json", "tokenizer.json", "model.safetensors", "sentence_bert_config.json"] {
            std::fs::copy(source.join(name), dir.join(name)).unwrap();
        }
        std::fs::write(dir.join("1_Pooling/config.json"), pooling).unwrap();
        dir
    };
    let cases = [
        ("mean", "{\"word_embedding_dimension\": 24, \"pooling_mode_mean_tokens\": true}"),
        ("mean", "{\"pooling_mode\": \"mean\"}"),
        ("cls", "{\"pooling_mode_cls_token\": true, \"pooling_mode_mean_tokens\": false}"),
        ("max", "{\"pooling_mode_max_tokens\": true}"),
        ("mean_sqrt_len", "{\"pooling_mode_mean_sqrt_len_tokens\": true}"),
    ];
    for (mode, pooling) in cases {
        let dir = folder(pooling);
        let identity = model::encoder_identity(&dir, &place.path().join("memory")).unwrap();
        assert_eq!((identity.pooling.as_str(), identity.max_tokens), (mode, 32));
        let encoder = Encoder::load(&dir).unwrap();
        let found = encoder.embed(&texts, &mut EncoderScratch::default()).unwrap();
        for (i, found) in found.iter().enumerate() {
            let off = found.iter().zip(expected[i][mode].as_array().unwrap()).map(|(f, e)| (f - number(e)).abs()).fold(0.0, f64::max);
            assert!(off < 2e-6, "{mode}, text {i}: off by {off}");
            assert_eq!(&encoder.embed(&texts[i..=i], &mut EncoderScratch::default()).unwrap()[0], found, "{mode}, text {i} alone");
        }
    }
    let two = Encoder::load(&folder("{\"pooling_mode_cls_token\": true, \"pooling_mode_mean_tokens\": true}")).unwrap();
    assert_eq!(two.embed(&["a"], &mut EncoderScratch::default()).unwrap()[0].len(), 48);
    // What is not supported is named.
    for (pooling, named) in
        [("{\"pooling_mode_lasttoken\": true}", "pooling_mode_lasttoken"), ("{}", "names no pooling"), ("{", "1_Pooling/config.json")]
    {
        assert!(Encoder::load(&folder(pooling)).unwrap_err().to_string().contains(named), "{pooling}");
    }
    let dir = folder("{\"pooling_mode\": \"mean\"}");
    std::fs::write(dir.join("modules.json"), "[{\"type\": \"sentence_transformers.models.Dense\", \"path\": \"2_Dense\"}]").unwrap();
    assert!(Encoder::load(&dir).unwrap_err().to_string().contains("Dense"));
    std::fs::remove_file(dir.join("modules.json")).unwrap();
    std::fs::remove_file(dir.join("1_Pooling/config.json")).unwrap();
    assert!(Encoder::load(&dir).unwrap_err().to_string().contains("1_Pooling/config.json"));
}

/// What is kept between stages changes nothing: keys and values, convolution and running states, or nothing at all and every window run again.
#[test]
fn staged_curves_are_those_of_one_stage_bit_for_bit_in_every_architecture() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/arch");
    let dirs = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let mut dropped = 0;
    for dir in dirs {
        let trunk = model::load_trunk(&dir, ALL).unwrap();
        let vocab = trunk.shape().vocab as u32;
        let document =
            |n: u32| Document { ids: (0..n).map(|i| (i * i * 7 + i * 3 + n) % vocab).collect(), edges: (1..n).step_by(3).collect() };
        // The last documents take several segments of 96 tokens.
        let documents = [document(40), document(9), document(90), document(170), document(231)];
        let readouts = Readouts { rr: None, lr: true, kl: false };
        for (prefix, positions) in [(vec![], Positions::Original), (vec![1], Positions::Original), (vec![2, 5], Positions::Reindexed)] {
            let one = ScoreSpec { prefix: Prefix::Tokens(prefix), context: 96, ..spec(readouts, 40, positions) };
            let stages = vec![Stage { horizon: 8, keep: 0.5 }, Stage { horizon: 16, keep: 0.3 }];
            let staged = ScoreSpec { stages: stages.clone(), ..one.clone() };
            let score = |spec: &ScoreSpec, options: EngineOptions| {
                let engine = Engine::new(trunk.clone(), spec.clone(), options).unwrap();
                let all = futures::executor::block_on(futures::future::join_all(documents.iter().map(|d| engine.score(d.clone()))));
                all.into_iter().map(|curves| curves.unwrap().into_iter().map(|c| c.lr).collect::<Vec<_>>()).collect::<Vec<_>>()
            };
            let whole = score(&one, options(1, 500));
            for (threads, batch_tokens, stage_memory) in
                [(1, 64, 1 << 30), (2, 300, 1 << 30), (2, 300, 0), (2, 1, 1 << 30), (3, 5000, 60_000)]
            {
                let found = score(&staged, EngineOptions { threads, batch_tokens, stage_memory });
                for ((found, whole), document) in found.iter().zip(&whole).zip(&documents) {
                    let after: Vec<u32> = document.edges.iter().map(|b| document.ids.len() as u32 - b).collect();
                    let reach = reach(&stages, 40, &Knots::new(40, 1), &whole.iter().cloned().collect(), &after);
                    for (((found, whole), &reach), &after) in found.iter().zip(whole).zip(&reach).zip(&after) {
                        let kept = if reach < after { Knots::new(40, 1).kept(reach) } else { whole.len() };
                        assert_eq!(found[..], whole[..kept], "{}: {staged:?}, {threads} threads, {after} tokens after", dir.display());
                        dropped += usize::from(kept < whole.len());
                    }
                }
            }
        }
    }
    assert!(dropped > 1000);
}
