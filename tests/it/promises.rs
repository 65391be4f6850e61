//! The promises of the design, each by a test of its name.

use std::collections::BTreeMap;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use right_reset::model;
use right_reset::score::{Document, EdgeCurves, Engine, EngineOptions, Positions, Prefix, Readouts, ScoreSpec};
use serde_json::Value;

use crate::tool::{Place, prose, root};

/// Texts of every kind that chunkers stumble over.
fn odd_texts() -> Vec<String> {
    let mut texts: Vec<String> = vec![
        "a\r\nb\r\n\r\nc".repeat(60),
        "nul\0inside \0 and after. ".repeat(20),
        "\u{feff}byte order mark first, and \u{feff}in the middle. ".repeat(20),
        "family 👩‍👩‍👧 flags 🇩🇪🇫🇷 skin 👍🏽 keycap 1️⃣ heart ❤️. ".repeat(20),
        "电源重新打开后，请再试一次。如果仍然不行，请联系销售店。".repeat(20),
        "電源を入れ直してから、もう一度「お試し」ください。".repeat(20),
        "ข้าวเหนียวต้องแช่น้ำหนึ่งคืนก่อนนึ่ง ".repeat(20),
        "e\u{301}\u{302}\u{303} zalgo o\u{336}\u{337} ".repeat(40),
        "QWxsIHlvdXIgYmFzZQ0K".repeat(60),
        "ab".repeat(500),
        "the same words again and again ".repeat(60),
        "{\"k\":[1,2,{\"x\":null}],\"s\":\"v\"}".repeat(30),
        " ".repeat(300),
        "\n\n\n\t \u{3000}\u{a0}".repeat(30),
        "x".into(),
        "\u{200d}".into(),
        "\u{1f1e6}".repeat(101),
        "שלום עולם! مرحبا بالعالم؟ ".repeat(30),
    ];
    let mut runner = TestRunner::deterministic();
    let shapes = proptest::prop_oneof![
        "\\PC{0,400}",
        "(?s).{0,300}",
        "[a-c\r\n .!?]{0,500}",
        "([\u{4e00}-\u{4e20}。、「」 \n]|[ก-ฮ]|[🎉👩🏽\u{200d}\u{fe0f}]|[a-z]{1,9} ){0,150}",
        "[ \t\r\n\u{85}\u{2028}x]{0,200}",
    ];
    texts.extend((0..400).map(|_| shapes.new_tree(&mut runner).unwrap().current()));
    texts
}

#[test]
fn promise_1_chunks_concatenate_to_the_document() {
    let texts = odd_texts();
    let place = Place::with_documents(&texts);
    place.run(&["--set", "input.id_column=id"]).ok();
    let mut by_document: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for chunk in place.chunks("out") {
        by_document.entry(chunk["doc_id"].as_str().unwrap().to_owned()).or_default().push(chunk);
    }
    for (i, text) in texts.iter().enumerate() {
        let chunks = by_document.remove(&format!("d{i}")).unwrap_or_default();
        let joined: String = chunks.iter().map(|c| c["text"].as_str().unwrap()).collect();
        assert_eq!(&joined, text, "document {i}");
        let (mut byte, mut char, mut token) = (0, 0, 0);
        for (index, chunk) in chunks.iter().enumerate() {
            let n = |key: &str| chunk[key].as_i64().unwrap();
            let piece = chunk["text"].as_str().unwrap();
            assert_eq!((n("byte_start"), n("char_start"), n("token_start")), (byte, char, token), "{text:?}");
            assert_eq!((n("chunk_index"), n("chunk_count")), (index as i64, chunks.len() as i64));
            (byte, char, token) = (n("byte_end"), n("char_end"), n("token_end"));
            assert_eq!(&text[n("byte_start") as usize..byte as usize], piece);
            assert_eq!(char - n("char_start"), piece.chars().count() as i64);
            assert_eq!(token - n("token_start"), n("token_count"));
            assert_eq!(chunk["cut_utility"].is_null(), index == 0);
        }
        assert_eq!(byte as usize, text.len());
    }
    assert!(by_document.is_empty());
    // Rows are reconciled.
    let rows = &place.summary("out")["rows"];
    let n = |k: &str| rows[k].as_u64().unwrap();
    assert_eq!(n("read"), texts.len() as u64);
    assert_eq!(n("read"), n("chunked") + n("empty") + n("null") + n("bad"));
}

#[test]
fn promise_2_a_window_has_the_same_bits_alone_or_in_any_batch() {
    use model::ops::Precision;
    for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
        same_bits(precision);
    }
}

fn same_bits(precision: model::ops::Precision) {
    let path = root().join("tests/tiny");
    let load = model::Load { depth: usize::MAX, extra: 64, head: true, device: model::ops::Device::Cpu, precision };
    let trunk = model::load_trunk(&path, load).unwrap();
    let tokenizer = model::load_tokenizer(&path).unwrap();
    let documents: Vec<Document> = prose(12, 40)
        .iter()
        .map(|text| {
            let ids = tokenizer.encode(text).unwrap().ids;
            let edges = (1..ids.len() as u32).step_by(5).collect();
            Document { ids, edges }
        })
        .collect();
    let prefixes = [Prefix::Tokens(vec![]), Prefix::Tokens(vec![0, 7]), Prefix::Local(3)];
    for (prefix, positions) in prefixes.into_iter().flat_map(|p| [(p.clone(), Positions::Original), (p, Positions::Reindexed)]) {
        let readouts = Readouts { rr: Some(model::Tap::Layer(3)), lr: true, kl: true };
        // A short context, so that documents take several segments.
        let spec = ScoreSpec { stages: Vec::new(), window: 24, skip: 1, readouts, positions, prefix, bos: Some(1), context: 128 };
        let score = |threads: usize, budget: usize, one_by_one: bool| -> Vec<Vec<Vec<u32>>> {
            let engine =
                Engine::new(trunk.clone(), spec.clone(), EngineOptions { threads, batch_tokens: budget, stage_memory: 0 }).unwrap();
            let bits = |curves: Vec<EdgeCurves>| {
                let of_edge = |c: &EdgeCurves| [&c.rr, &c.lr, &c.kl].into_iter().flatten().map(|v| v.to_bits()).collect();
                curves.iter().map(of_edge).collect()
            };
            if one_by_one {
                // Every edge a document of its own: single windows.
                let one = |d: &Document, e: u32| engine.score_blocking(Document { ids: d.ids.clone(), edges: vec![e] }).unwrap().remove(0);
                return documents.iter().map(|d| bits(d.edges.iter().map(|&e| one(d, e)).collect())).collect();
            }
            let all = futures::executor::block_on(futures::future::join_all(documents.iter().map(|d| engine.score(d.clone()))));
            all.into_iter().map(|r| bits(r.unwrap())).collect()
        };
        let singles = score(1, 1, true);
        for (threads, budget) in [(1, 1), (1, 300), (2, 1), (2, 777), (3, 100), (3, 100_000)] {
            assert!(score(threads, budget, false) == singles, "{threads} threads, {budget} tokens, {spec:?}");
        }
    }
}

#[test]
fn promise_2_batch_budget_threads_shard_order_and_cache_change_no_byte() {
    let texts = prose(60, 30);
    let place = Place::with_documents(&texts[..40]);
    place.documents("in/b.jsonl", &texts[40..]);
    place.run(&["--set", "output.format=parquet", "--threads", "1"]).ok();
    let reference = place.data("out");
    assert_eq!(reference.len(), 2);
    for (i, (threads, budget)) in [("2", "1"), ("3", "100"), ("1", "50000")].into_iter().enumerate() {
        let (out, cache) = (format!("out{i}"), format!("cache.path=cache{i}"));
        let budget = format!("score.batch_tokens={budget}");
        place.run(&["--set", "output.format=parquet", "--threads", threads, "--output", &out, "--set", &cache, "--set", &budget]).ok();
        assert!(place.data(&out) == reference, "{threads} threads, {budget}");
    }
    // Inputs in another order, and everything from the cache.
    place.run(&["--set", "output.format=parquet", "--output", "warm", "--input", "in/b.jsonl", "--input", "in/a.jsonl"]).ok();
    assert_eq!(place.data("warm"), reference);
    assert_eq!(place.summary("warm")["documents"]["scored"], 0);
    place.run(&["--set", "output.format=parquet", "--output", "off", "--set", "cache.mode=off"]).ok();
    assert_eq!(place.data("off"), reference);
    for out in ["ipc1", "ipc2"] {
        place.run(&["--set", "output.format=arrow", "--output", out]).ok();
    }
    assert_eq!(place.data("ipc1"), place.data("ipc2"));
}

#[test]
fn promise_3_what_changes_a_score_changes_the_key_and_segmentation_does_not() {
    let texts = prose(6, 30);
    let place = Place::with_documents(&texts);
    let scored = |settings: &[&str]| -> u64 {
        let settings: Vec<&str> = settings.iter().flat_map(|s| ["--set", s]).collect();
        place.run(&[&settings[..], &["--output", "scratch"]].concat()).ok();
        let documents = &place.summary("scratch")["documents"];
        std::fs::remove_dir_all(place.path("scratch")).unwrap();
        assert_eq!(
            documents["scored"].as_u64().unwrap() + documents["from_cache"].as_u64().unwrap() + documents["not_needed"].as_u64().unwrap(),
            6
        );
        documents["scored"].as_u64().unwrap()
    };
    let all = scored(&[]);
    assert!(all >= 4);
    for nothing in [
        "segment.penalty=0.5",
        "segment.target_mean_tokens=30",
        "segment.target=20",
        "segment.max=200",
        "segment.length_weight=1",
        "segment.utility={ rr = 2.0 }",
        "output.format=parquet",
        "output.provenance=false",
        "model.threads=1",
        "score.batch_tokens=64",
        // Served by the curves of the longer window.
        "score.window=16",
    ] {
        assert_eq!(scored(&[nothing]), 0, "{nothing}");
    }
    for change in [
        "score.layer=2",
        "score.layer=final",
        "score.window=32",
        "score.window=12",
        "score.skip=2",
        "score.positions=reindexed",
        "score.reset_prefix=bos",
        "score.reset_prefix=separator:. ",
        "score.reset_prefix=local:2",
        "score.context=256",
        "model.bos=true",
        "model.precision=bf16",
        "model.precision=int8",
        "edges.grid=4",
        "edges.sentence_ends=false",
    ] {
        assert_eq!(scored(&[change]), all, "{change}");
        assert_eq!(scored(&[change]), 0, "{change}, again");
    }
    // "75%" of 4 layers is layer 3, typed another way.
    assert_eq!(scored(&["score.layer=3"]), 0);
    // So is the token that this model's documents begin with: the one its files name.
    assert_eq!(scored(&["score.reset_prefix=document"]), 0);
    // Another tokenizer or other weights.
    let copy = place.path("model");
    std::fs::create_dir(&copy).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(root().join("tests/tiny").join(name), copy.join(name)).unwrap();
    }
    let model = format!("model.name={}", copy.display());
    assert_eq!(scored(&[&model]), 0, "the same model elsewhere");
    let mut tokenizer = std::fs::read(copy.join("tokenizer.json")).unwrap();
    tokenizer.push(b'\n');
    std::fs::write(copy.join("tokenizer.json"), tokenizer).unwrap();
    assert_eq!(scored(&[&model]), all, "another tokenizer file");
    let mut weights = std::fs::read(copy.join("model.safetensors")).unwrap();
    let end = weights.len() - 2;
    weights[end] ^= 0x10;
    std::fs::write(copy.join("model.safetensors"), weights).unwrap();
    assert_eq!(scored(&[&model]), all, "other weights");
}

#[test]
fn promise_4_killed_at_any_step_and_run_again_gives_the_same_files() {
    let texts = prose(30, 12);
    let files = |place: &Place| {
        for (i, part) in texts.chunks(10).enumerate() {
            place.documents(&format!("in/{i}.jsonl"), part);
        }
    };
    let reference = Place::new();
    files(&reference);
    reference.run(&[]).ok();
    let expected = reference.data("out");
    assert_eq!(expected.len(), 3);
    for point in [
        "after-write",
        "after-cache-flush",
        "before-file-sync",
        "before-rename",
        "before-folder-sync",
        "before-manifest-line",
        "after-manifest-line",
        "before-success",
    ] {
        for hit in 0..3 {
            if point == "before-success" && hit > 0 {
                continue;
            }
            let place = Place::new();
            files(&place);
            let trigger = if hit == 0 { format!("{point}=return") } else { format!("{point}={hit}*off->return") };
            let status = place.command(&["run", "p.toml"]).env("FAILPOINTS", &trigger).output().unwrap().status;
            assert!(!status.success(), "{trigger} did not stop the run");
            assert!(!place.path("out/_SUCCESS").exists());
            place.run(&[]).ok();
            assert!(place.data("out") == expected, "{trigger}");
            assert!(place.path("out/_SUCCESS").exists());
            let rows = place.summary("out")["rows"].clone();
            assert_eq!((rows["read"].as_u64(), rows["chunked"].as_u64()), (Some(30), Some(30)), "{trigger}");
        }
    }
}

#[test]
fn promise_4_killed_while_old_parts_are_replaced_or_removed() {
    let texts = prose(20, 12);
    let prepare = || {
        let place = Place::new();
        place.documents("in/a.jsonl", &texts[..10]);
        place.documents("in/b.jsonl", &texts[10..]);
        place.run(&["--set", "output.format=arrow"]).ok();
        place
    };
    let reference = prepare();
    reference.run(&["--set", "segment.penalty=0.3"]).ok();
    let expected = reference.data("out");
    assert_eq!(expected.len(), 2, "the Arrow files of the old specification are gone");
    for trigger in
        ["before-remove-old-part=return", "before-remove-old-part=1*off->return", "before-manifest-line=return", "before-success=return"]
    {
        let place = prepare();
        let status = place.command(&["run", "p.toml", "--set", "segment.penalty=0.3"]).env("FAILPOINTS", trigger).output().unwrap().status;
        assert!(!status.success());
        place.run(&["--set", "segment.penalty=0.3"]).ok();
        assert_eq!(place.data("out").keys().filter(|k| k.ends_with("jsonl")).count(), 2, "{trigger}");
        assert!(expected.iter().all(|(name, bytes)| place.data("out").get(name) == Some(bytes)), "{trigger}");
    }
}

#[test]
fn promise_5_memory_does_not_follow_the_size_of_the_file() {
    let place = Place::new();
    let texts = prose(50, 40);
    let once: String = texts.iter().map(|t| serde_json::json!({ "text": t }).to_string() + "\n").collect();
    let peak = |bytes: usize| -> u64 {
        place.write("in/a.jsonl", once.repeat(bytes / once.len()).as_bytes());
        place.run(&["--set", "output.format=parquet"]).ok();
        place.summary("out")["peak_memory_bytes"].as_u64().unwrap()
    };
    peak(100_000);
    let (small, large) = (peak(10 << 20), peak(100 << 20));
    assert!(large < small + (120 << 20), "{} MiB for 10 MiB, {} MiB for 100 MiB", small >> 20, large >> 20);
}

#[test]
fn promise_6_bad_rows_are_named_and_follow_the_policy() {
    let place = Place::new();
    let good = prose(1, 10).remove(0);
    let mut bytes =
        format!("{{\"id\":\"x\",\"text\":{:?}}}\nnonsense\n{{\"id\":\"y\",\"text\":null}}\n{{\"id\":null,\"text\":\"abc\"}}\n", good)
            .into_bytes();
    bytes.extend_from_slice(b"{\"id\":\"z\",\"text\":\"\xff\"}\n{\"id\":\"w\",\"text\":\"\"}\n");
    place.write("in/a.jsonl", &bytes);
    let id = ["--set", "input.id_column=id"];
    place.run(&id).fails(1, "a.jsonl, row 1: not a JSON object").fails(1, "quarantine");
    place.run(&[&id[..], &["--set", "input.on_bad_row=skip"]].concat()).ok();
    let rows = place.summary("out")["rows"].clone();
    let n = |k: &str| rows[k].as_u64().unwrap();
    assert_eq!((n("read"), n("chunked"), n("empty"), n("null"), n("bad")), (6, 1, 1, 1, 3));
    for _ in 0..2 {
        // The second time the part is remade: the quarantine holds each row once.
        place.run(&[&id[..], &["--set", "input.on_bad_row=quarantine", "--output", "q"]].concat()).ok();
        let lines = crate::tool::json_lines(&std::fs::read(place.path("q/_right-reset/quarantine.jsonl")).unwrap());
        assert_eq!(lines.iter().map(|l| l["source_row"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3, 4]);
        std::fs::remove_file(place.data("q").keys().next().map(|k| place.path("q").join(k)).unwrap()).unwrap();
    }
    let few = ["--set", "input.on_bad_row=skip", "--set", "input.max_bad_rows=2", "--output", "m"];
    place.run(&[&id[..], &few].concat()).fails(1, "more than input.max_bad_rows = 2");
}

#[test]
fn promise_7_nothing_but_a_fetch_opens_a_connection() {
    // One crate can, one file uses it.
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).unwrap();
    for name in ["reqwest", "hyper", "curl", "hf-hub", "native-tls", "openssl", "tungstenite"] {
        assert!(!lock.contains(&format!("name = \"{name}\"\n")), "{name}");
    }
    let mut folders = vec![root().join("src")];
    let mut speaking = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            if ["ureq", "std::net", "tokio::net", "TcpStream", "UdpSocket"].iter().any(|word| text.contains(word)) {
                speaking.push(path.strip_prefix(root()).unwrap().to_owned());
            }
        }
    }
    assert_eq!(speaking, [std::path::Path::new("src/model/hub.rs")]);

    // Whatever a command might turn to leads to a listener that hears nothing.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let place = Place::with_documents(&prose(2, 40));
    for arguments in [
        &["run", "p.toml"][..],
        &["run", "p.toml", "--set", "model.name=org/model"],
        &["score", "p.toml", "--output", "e.parquet"],
        &["sweep", "p.toml", "--penalty", "0.8:0.9:0.1"],
        &["models", "list"],
        &["models", "show", "org/model"],
    ] {
        let mut command = place.command(arguments);
        for name in ["HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"] {
            command.env(name, &address);
        }
        command.output().unwrap();
        assert!(listener.accept().is_err(), "{arguments:?}");
    }
}
