//! `calibrate` and `eval`: methods side by side on documents whose true units are known.

use serde_json::{Value, json};

use crate::tool::{Place, json_lines, prose};

/// Streams of three records each, in two domains.
fn streams(place: &Place, name: &str, count: usize, skip: usize) {
    let records: Vec<String> = prose(400, 14).into_iter().filter(|r| r.len() > 150).skip(skip * 3).take(count * 3).collect();
    let lines: Vec<String> = records
        .chunks_exact(3)
        .enumerate()
        .map(|(i, records)| {
            let starts: Vec<usize> = records.iter().scan(0, |at, r| Some(std::mem::replace(at, *at + r.len() + 1))).collect();
            let topic = if i % 2 == 0 { "a" } else { "b" };
            json!({ "id": format!("s{i}"), "topic": topic, "text": records.join(" "), "starts": starts }).to_string()
        })
        .collect();
    place.write(name, (lines.join("\n") + "\n").as_bytes());
}

const METHODS: &str = "pipeline,rr,lr,rr+lr,boundary_surprisal,window_surprisal,ppl_minimum,attention_isolation,residual_jump,\
                       local_hidden_distance,embedding_jump,sentence,punctuation,fixed_grid,random";

#[test]
fn penalties_found_on_one_split_are_used_on_the_other_and_by_run() {
    let place = Place::new();
    streams(&place, "in/cal.jsonl", 6, 0);
    streams(&place, "dev.jsonl", 8, 6);
    let judged = ["--gold", "starts", "--domain", "topic", "--methods", METHODS];
    let found = place.tool(&[&["calibrate", "p.toml", "--fusion", "--output", "cal.toml"], &judged[..]].concat()).ok();
    assert!(found.stderr.contains("window_surprisal"), "{}", found.stderr);
    let overlay = std::fs::read_to_string(place.path("cal.toml")).unwrap();
    assert!(overlay.contains("[segment]\npenalty = ") && overlay.contains("[eval.methods.\"rr+lr\"]"), "{overlay}");

    let eval = ["eval", "p.toml", "--overlay", "cal.toml", "--input", "dev.jsonl", "--resamples", "200", "--baseline", "sentence"];
    let json = |more: &[&str]| -> Value { serde_json::from_slice(&place.tool(&[&eval[..], &judged, more].concat()).ok().stdout).unwrap() };
    let mut found = json(&["--json"]);
    assert_eq!((&found["documents"], &found["units"], &found["baseline"]), (&json!(8), &json!(24), &json!("sentence")));
    let methods = found["methods"].as_array().unwrap();
    assert_eq!(methods.len(), METHODS.split(',').count());
    for method in methods {
        let interval = &method["measures"]["clean_unit_recovery"];
        let [value, low, high] = ["value", "low", "high"].map(|k| interval[k].as_f64().unwrap());
        assert!((0.0..=1.0).contains(&value) && low <= value && value <= high, "{method}");
        assert_eq!(method["calibrated"], json!(true), "{method}");
        assert_eq!(method["difference"].is_null(), method["method"] == "sentence", "{method}");
        assert_eq!(method["domains"].as_object().unwrap().len(), 2);
    }
    // What is paid for is said: comparators share one pass, the percentiles of the pipeline's own readout come from the cache.
    let of = |name: &str| methods.iter().find(|m| m["method"] == name).unwrap();
    assert_eq!(of("residual_jump")["forward_tokens"], found["tokens"]);
    assert_eq!((&of("pipeline")["from_cache"], &of("rr")["from_cache"]), (&json!(0), &json!(8)));
    assert_eq!(of("pipeline")["measures"], of("rr")["measures"]);
    assert_eq!(of("sentence")["forward_tokens"], json!(0));

    // The same again, but for what it cost.
    let mut again = json(&["--json"]);
    for e in [&mut found, &mut again] {
        for method in e["methods"].as_array_mut().unwrap() {
            ["forward_tokens", "seconds", "from_cache"].iter().for_each(|key| drop(method.as_object_mut().unwrap().remove(*key)));
        }
    }
    assert_eq!(found, again);
    let markdown = place.tool(&[&eval[..], &judged, &["--markdown"]].concat()).ok();
    let text = String::from_utf8(markdown.stdout).unwrap();
    assert!(text.starts_with("| method | penalty |") && text.contains("| method | recovery, a | recovery, b |"), "{text}");

    // Chunks made elsewhere: what `run` makes is judged as the pipeline is.
    place.tool(&["run", "p.toml", "--overlay", "cal.toml", "--input", "dev.jsonl", "--output", "--set", "output.format=jsonl"]);
    let chunks = place.tool(&["run", "p.toml", "--overlay", "cal.toml", "--input", "dev.jsonl", "--output", "-"]).ok();
    place.write("mine.jsonl", &chunks.stdout);
    let with_chunks = json(&["--json", "--chunks", "mine=mine.jsonl"]);
    let rows = with_chunks["methods"].as_array().unwrap();
    let mine = rows.last().unwrap();
    assert_eq!((&mine["method"], &mine["penalty"]), (&json!("mine"), &Value::Null));
    for key in ["clean_unit_recovery", "partition_f1", "pk", "near_f1"] {
        assert_eq!(mine["measures"][key], rows[0]["measures"][key], "{key}");
    }
    assert_eq!(mine["chunks"], rows[0]["chunks"]);

    // The pipeline's own figures are those of what `run` makes with the overlay.
    place.run(&["--overlay", "cal.toml", "--input", "dev.jsonl"]).ok();
    let own = found["methods"].as_array().unwrap().iter().find(|m| m["method"] == "pipeline").unwrap();
    assert_eq!(own["chunks"]["count"].as_u64().unwrap() as usize, place.chunks("out").len());
    assert!(place.summary("out")["penalty"] == own["penalty"]);
}

#[test]
fn an_instruction_model_is_asked_once() {
    let place = Place::new();
    streams(&place, "in/a.jsonl", 3, 0);
    let eval = |model: &str| {
        let fixed = ["eval", "p.toml", "--gold", "starts", "--methods", "prompted,sentence", "--resamples", "10", "--json"];
        place.tool(&[&fixed[..], &["--prompt-model", model]].concat())
    };
    place
        .tool(&["eval", "p.toml", "--gold", "starts", "--methods", "prompted"])
        .fails(1, "answers are generated by GGUF files of instruction models");
    crate::common::write_tiny_chat(&place.path("small.gguf"), 256);
    eval("small.gguf").fails(1, "is outside the 256 positions of the model");
    crate::common::write_tiny_chat(&place.path("chat.gguf"), 4096);
    let first = eval("chat.gguf").ok();
    let found: Value = serde_json::from_slice(&first.stdout).unwrap();
    let row = &found["methods"][0];
    // A random model hardly ever tells a probability.
    assert_eq!((&row["method"], &row["from_cache"]), (&json!("prompted"), &json!(0)));
    let omitted = row["omitted"].as_f64().unwrap();
    assert!(omitted > 0.9 && omitted <= 1.0, "{omitted}");
    assert!(row["forward_tokens"].as_u64().unwrap() > 3 * found["tokens"].as_u64().unwrap());
    let again: Value = serde_json::from_slice(&eval("chat.gguf").ok().stdout).unwrap();
    let again = &again["methods"][0];
    assert_eq!((&again["from_cache"], &again["forward_tokens"], &again["measures"]), (&json!(3), &json!(0), &row["measures"]));
    assert_eq!(again["omitted"], row["omitted"]);
    let table = place
        .tool(&["eval", "p.toml", "--gold", "starts", "--methods", "prompted", "--resamples", "10", "--prompt-model", "chat.gguf"])
        .ok();
    assert!(table.stderr.contains(&format!("left {:.2} % of the candidates out", omitted * 100.0)), "{}", table.stderr);
    place.tool(&["calibrate", "p.toml", "--gold", "starts", "--methods", "prompted", "--prompt-model", "chat.gguf"]).ok();
}

#[test]
fn show_prints_one_document_and_view_says_what_it_cannot_show() {
    let place = Place::new();
    streams(&place, "in/a.jsonl", 3, 0);
    let texts: Vec<String> =
        json_lines(&std::fs::read(place.path("in/a.jsonl")).unwrap()).iter().map(|r| r["text"].as_str().unwrap().to_owned()).collect();
    let shown = place.tool(&["show", "p.toml", "--doc", "a.jsonl#1", "--gold", "starts"]).ok();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(
        shown.starts_with("a.jsonl#1: ") && shown.contains("  utility\n") && shown.contains("  true units\n") && !shown.contains('\x1b'),
        "{shown}"
    );
    let chunks: String = shown.split("\n── ").skip(1).map(|chunk| chunk.split_once('\n').unwrap().1.trim_end_matches('\n')).collect();
    assert_eq!(chunks, texts[1]);
    // Only what is shown was scored.
    assert_eq!(place.run(&[]).ok().stderr.matches("1 from cache, 2 scored").count(), 1);
    place.tool(&["show", "p.toml", "--doc", "b"]).fails(1, "document \"b\" is not in the input: without input.id_column");
    place
        .tool(&["view", "in/a.jsonl", "--output", "r.html"])
        .fails(1, "row 0 has no chunk_index or token_count: it holds no chunks of right-reset");
    place
        .tool(&["view", "p.toml", "--output", "r.html", "--set", "segment.target_mean_tokens=50"])
        .fails(1, "give the one that the run found");
    assert!(!place.path("r.html").exists());
}

#[test]
fn gold_that_is_missing_or_does_not_fit_is_named() {
    let place = Place::new();
    streams(&place, "in/a.jsonl", 2, 0);
    let eval = |more: &[&str]| place.tool(&[&["eval", "p.toml", "--methods", "sentence", "--resamples", "10"], more].concat());
    eval(&["--gold", "nothing"]).fails(1, "a.jsonl, row 0: nothing: is null");
    eval(&["--gold", "topic"]).fails(1, "not a JSON list of bytes");
    eval(&["--gold", "starts", "--baseline", "rr"]).fails(1, "the baseline \"rr\" is not among the methods: sentence");
    eval(&["--gold", "starts", "--methods", "sentense"]).fails(2, "is no method; there are pipeline");
    eval(&["--gold", "starts", "--set", "segment.count=3"]).fails(1, "leave segment.count");
    let mut rows = json_lines(&std::fs::read(place.path("in/a.jsonl")).unwrap());
    rows[1]["starts"] = json!([0, 400, 300]);
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    place.write("in/a.jsonl", lines.join("\n").as_bytes());
    eval(&["--gold", "starts"]).fails(1, "row 1: starts: the units at bytes 400 and 300 are not in order");
    std::fs::remove_file(place.path("in/a.jsonl")).unwrap();
    place.write("in/a.jsonl", b"");
    eval(&["--gold", "starts"]).fails(1, "holds no document to evaluate on");
}

#[test]
fn streams_are_built_of_records_and_read_back_from_pictures() {
    let place = Place::new();
    let records: Vec<String> = prose(60, 9);
    let lines: Vec<String> = records
        .iter()
        .enumerate()
        .map(|(i, text)| json!({ "id": format!("r{i}"), "text": text.replace(". ", ".\n\n") }).to_string())
        .collect();
    place.write("records.jsonl", lines.join("\n").as_bytes());
    let build = |more: &[&str]| {
        let fixed =
            ["streams", "build", "records.jsonl", "--id-column", "id", "--likeness", "words", "--min-words", "12", "--max-words", "60"];
        place.tool(&[&fixed[..], more].concat())
    };
    build(&["--output", "s", "--calibration", "0.3"]).ok();
    let read = |file: &str| json_lines(&std::fs::read(place.path(file)).unwrap());
    let (calibration, evaluation) = (read("s/calibration.jsonl"), read("s/evaluation.jsonl"));
    assert!(!calibration.is_empty() && evaluation.len() > calibration.len());
    let mut used = std::collections::HashSet::new();
    for stream in calibration.iter().chain(&evaluation) {
        let (text, starts) = (stream["text"].as_str().unwrap(), stream["record_byte_starts"].as_array().unwrap());
        assert!(!text.contains('\n') && (3..=6).contains(&starts.len()));
        for (start, id) in starts.iter().zip(stream["record_ids"].as_array().unwrap()) {
            let id = id.as_str().unwrap();
            assert!(text[start.as_u64().unwrap() as usize..].starts_with(&records[id[1..].parse::<usize>().unwrap()]), "{id}");
            assert!(used.insert(id.to_owned()));
        }
    }
    build(&["--output", "s"]).fails(1, "is there already; --force replaces it");
    build(&["--output", "t", "--calibration", "0.3"]).ok();
    assert!(
        ["calibration.jsonl", "evaluation.jsonl", "build.json"]
            .iter()
            .all(|f| { std::fs::read(place.path(&format!("s/{f}"))).unwrap() == std::fs::read(place.path(&format!("t/{f}"))).unwrap() })
    );
    place
        .tool(&["streams", "build", "records.jsonl", "--output", "u", "--likeness", "words", "--min-words", "200"])
        .fails(1, "are too few for a stream");
    // What was built can be judged.
    place.tool(&["calibrate", "p.toml", "--input", "s/calibration.jsonl", "--gold", "record_byte_starts", "--methods", "sentence,rr"]).ok();

    let rendered = build(&["--output", "ocr", "--streams", "3", "--render", "180"]);
    let there = |program: &str| std::process::Command::new(program).arg("--version").output().is_ok();
    if !there("pango-view") || !there("tesseract") {
        rendered.fails(1, "install it (Debian: apt-get install");
        return;
    }
    rendered.ok();
    let built: Value = serde_json::from_slice(&std::fs::read(place.path("ocr/build.json")).unwrap()).unwrap();
    assert!(built["character_agreement"].as_f64().unwrap() > 0.95, "{built}");
    for stream in read("ocr/evaluation.jsonl") {
        let starts: Vec<u64> = stream["record_byte_starts"].as_array().unwrap().iter().map(|s| s.as_u64().unwrap()).collect();
        assert!(starts.windows(2).all(|p| p[0] < p[1]) && starts.len() == stream["record_ids"].as_array().unwrap().len());
    }
}

#[test]
fn the_mechanism_study_runs_on_a_corpus_or_a_pipeline() {
    let place = Place::new();
    let lines: Vec<String> =
        prose(3, 900).iter().enumerate().map(|(i, text)| json!({ "book": format!("b{i}"), "text": text }).to_string()).collect();
    place.write("in/books.jsonl", lines.join("\n").as_bytes());
    let model = format!("model.name={:?}", crate::tool::root().join("tests/tiny"));
    let limits = ["--set", "segment.target=40", "--set", "segment.min=12", "--set", "segment.max=90"];
    let fixed = [
        "--passages",
        "2",
        "--tokens",
        "250",
        "--resamples",
        "100",
        "--source",
        "book",
        "--prefixes",
        "bos|separator:. |local:8",
        "--json",
    ];
    let found = place.tool(&[&["mechanism", "p.toml"], &fixed[..]].concat()).ok();
    let study: Value = serde_json::from_slice(&found.stdout).unwrap();
    let corpus = [&["mechanism", "in/books.jsonl", "--set", &model, "--set", "cache.mode=off"], &limits[..], &fixed].concat();
    let again: Value = serde_json::from_slice(&place.tool(&corpus).ok().stdout).unwrap();
    assert_eq!(study, again, "a pipeline or a file, from the cache or not");
    assert_eq!((study["sources"].as_u64(), study["passages"].as_u64()), (Some(3), Some(6)));
    let rows = |of: &str| study[of].as_array().unwrap().clone();
    let value = |row: &Value, key: &str| row[key]["value"].as_f64().unwrap();
    let (methods, layers) = (rows("methods"), rows("layers"));
    assert_eq!((methods.len(), rows("windows").len(), rows("prefixes").len()), (14, 2 * 37, 4));
    // Cuts chosen by the divergence itself have the largest margin that these limits allow, up to the length term; RR at its own layer is RR.
    let best = value(methods.iter().find(|m| m["name"] == "kl").unwrap(), "margin");
    assert!(methods.iter().all(|m| value(m, "margin") <= best + 0.05), "{methods:?}");
    let rr = value(&methods[0], "margin");
    assert!(layers.iter().any(|l| (value(l, "margin") - rr).abs() < 1e-9), "{layers:?}");
    let none = &rows("prefixes")[0];
    assert_eq!((value(none, "matched"), value(none, "crossed")), (rr, rr));
    let cell = rows("windows").into_iter().find(|c| c["readout"] == "rr" && c["scored"] == 24 && c["judged"] == 24).unwrap();
    assert_eq!(value(&cell, "margin"), rr);
    place.tool(&["mechanism", "p.toml", "--tokens", "100000"]).fails(1, "no row has 2 passages of 100000 tokens");
}

#[test]
fn sections_are_compared_at_the_ends_of_given_sentences() {
    let place = Place::new();
    let write = |name: &str, from: usize| {
        let sentences: Vec<String> = prose(8 + from, 40)
            .into_iter()
            .skip(from)
            .flat_map(|t| t.split_inclusive(". ").map(str::to_owned).collect::<Vec<_>>())
            .collect();
        let lines: Vec<String> = sentences
            .chunks_exact(12)
            .enumerate()
            .map(|(i, s)| json!({ "id": format!("d{i}"), "sentences": s, "masses": [5, 4, 3] }).to_string())
            .collect();
        place.write(name, lines.join("\n").as_bytes());
        lines.len()
    };
    let (_, judged) = (write("cal.jsonl", 0), write("eval.jsonl", 20));
    let model = format!("model.name={:?}", crate::tool::root().join("tests/tiny"));
    let encoder = format!("score.encoder={:?}", crate::tool::root().join("tests/golden/encoder"));
    let fixed = [
        "eval.jsonl",
        "--calibration",
        "cal.jsonl",
        "--set",
        &model,
        "--set",
        &encoder,
        "--set",
        "cache.mode=off",
        "--set",
        "score.context=256",
    ];
    let found = place.tool(&[&["sections"], &fixed[..], &["--resamples", "50", "--json"]].concat()).ok();
    let found: Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!((found["documents"].as_u64(), found["sections"].as_u64()), (Some(judged as u64), Some(3 * judged as u64)));
    let rows = found["methods"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|r| r["method"].as_str().unwrap()).collect();
    assert_eq!(names, ["rr", "lr", "embed", "residual_jump", "local_hidden_distance", "lexical_cohesion", "uniform", "no_cut"]);
    let none = rows.last().unwrap();
    assert_eq!((none["sections"].as_f64(), none["boundary_f1"].as_f64()), (Some(1.0), Some(0.0)));
    // By hand: k = 2, ten windows, and each of the two boundaries is missed by the two windows that it parts.
    assert_eq!(none["pk"]["value"].as_f64(), Some(0.4));
    place.write("eval.jsonl", json!({ "id": "x", "sentences": ["A b.", "C d."], "masses": [3] }).to_string().as_bytes());
    place.tool(&[&["sections"], &fixed[..]].concat()).fails(1, "row 0: its masses [3] do not add up to its 2 sentences");
}

#[test]
fn every_command_of_the_evaluation_runs_on_the_demo_corpus() {
    let place = Place::new();
    let root = crate::tool::root();
    let demo = root.join("pipelines/demo.toml").to_string_lossy().into_owned();
    let settings = [
        "preset=paper".to_owned(),
        "segment.penalty=0.8".to_owned(),
        format!("model.name={:?}", root.join("tests/tiny")),
        format!("score.encoder={:?}", root.join("tests/golden/encoder")),
        format!("cache.path={:?}", place.path("cache")),
    ];
    let tool = |command: &[&str], more: &[&str]| {
        let sets: Vec<&str> = settings.iter().flat_map(|s| ["--set", s]).collect();
        place.tool(&[command, &sets, more].concat()).ok()
    };
    let records = root.join("pipelines/demo/records.jsonl");
    let read = json_lines(&std::fs::read(&records).unwrap());

    let judged = ["--gold", "record_byte_starts", "--domain", "topic", "--methods", "pipeline,lr,embed,window_surprisal,sentence"];
    tool(&["calibrate", &demo, "--output", "cal.toml"], &judged);
    let found = tool(&["eval", &demo, "--overlay", "cal.toml", "--resamples", "100", "--json"], &judged);
    let found: Value = serde_json::from_slice(&found.stdout).unwrap();
    let units: usize = read.iter().map(|r| r["record_byte_starts"].as_array().unwrap().len()).sum();
    assert_eq!((found["documents"].as_u64(), found["units"].as_u64()), (Some(read.len() as u64), Some(units as u64)));

    let study = ["--passages", "1", "--tokens", "128", "--source", "topic", "--resamples", "20", "--prefixes", "bos", "--json"];
    let study: Value = serde_json::from_slice(&tool(&["mechanism", &demo], &study).stdout).unwrap();
    let topics: std::collections::HashSet<&str> = read.iter().map(|r| r["topic"].as_str().unwrap()).collect();
    assert_eq!(study["sources"].as_u64(), Some(topics.len() as u64));

    let records = records.to_string_lossy().into_owned();
    let packing = ["--id-column", "id", "--domain", "topic", "--likeness", "words", "--min-words", "20"];
    place.tool(&[&["streams", "build", &records, "--output", "streams"], &packing[..]].concat()).ok();

    // The records' own starts are the sections of a document's sentences.
    let lines: Vec<String> = read
        .iter()
        .map(|r| {
            let (text, starts) = (r["text"].as_str().unwrap(), r["record_byte_starts"].as_array().unwrap());
            let bounds: Vec<usize> = starts.iter().map(|s| s.as_u64().unwrap() as usize).chain([text.len()]).collect();
            let units: Vec<Vec<&str>> = bounds.windows(2).map(|b| text[b[0]..b[1]].split_inclusive(". ").collect()).collect();
            json!({ "id": r["id"], "sentences": units.concat(), "masses": units.iter().map(Vec::len).collect::<Vec<_>>() }).to_string()
        })
        .collect();
    let (first, second) = lines.split_at(lines.len() / 2);
    place.write("first.jsonl", first.join("\n").as_bytes());
    place.write("second.jsonl", second.join("\n").as_bytes());
    let sections = ["--set", "score.context=256", "--calibration", "first.jsonl", "--resamples", "20", "--json"];
    let sections: Value = serde_json::from_slice(&tool(&["sections", "second.jsonl"], &sections).stdout).unwrap();
    assert_eq!(sections["documents"].as_u64(), Some(second.len() as u64));

    tool(&["view", &demo, "--output", "report.html"], &["--gold", "record_byte_starts"]);
    assert!(std::fs::read_to_string(place.path("report.html")).unwrap().contains("rivers-1"));
    let shown = String::from_utf8(tool(&["show", &demo], &["--doc", "rivers-1"]).stdout).unwrap();
    assert!(shown.starts_with("rivers-1: "), "{shown}");
}
