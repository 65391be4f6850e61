//! Night after night: incremental runs, plans, ranks, and what is done to caches.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use serde_json::Value;

use crate::tool::{Place, done, json_lines, prose};

/// A Parquet file whose row groups hold `each` documents.
pub fn parquet(path: &Path, texts: &[String], each: usize) {
    let batch = |texts: &[String]| {
        let column: ArrayRef = Arc::new(texts.iter().map(|t| Some(t.as_str())).collect::<StringArray>());
        RecordBatch::try_from_iter([("text", column)]).unwrap()
    };
    let mut writer = ArrowWriter::try_new(std::fs::File::create(path).unwrap(), batch(&[]).schema(), None).unwrap();
    for group in texts.chunks(each) {
        writer.write(&batch(group)).unwrap();
        writer.flush().unwrap();
    }
    writer.close().unwrap();
}

fn counts(place: &Place, output: &str) -> [u64; 5] {
    let s = place.summary(output);
    let n = |v: &Value| v.as_u64().unwrap();
    [n(&s["parts_made"]), n(&s["parts_kept"]), n(&s["parts_removed"]), n(&s["documents"]["scored"]), n(&s["rows"]["read"])]
}

fn manifest(place: &Place, service: &str) -> Vec<Value> {
    json_lines(&std::fs::read(place.path(service).join("manifest.jsonl")).unwrap())
}

/// Why each part of the manifest was made, by input.
fn why(place: &Place) -> BTreeMap<String, String> {
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    let lines = manifest(place, "out/_right-reset");
    lines.iter().filter(|l| l["kind"] == "part").map(|l| (text(&l["input"]), text(&l["why"]))).collect()
}

/// All files below a folder with their bytes.
fn everything(folder: &Path) -> BTreeMap<std::path::PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.append(&mut everything(&path));
        } else {
            files.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    files
}

/// Chunk rows of an output folder without what tells where they came from in it.
fn rows(place: &Place, output: &str) -> Vec<String> {
    let mut rows: Vec<String> = place.chunks(output).iter().map(Value::to_string).collect();
    rows.sort();
    rows
}

#[test]
fn a_run_does_what_is_new_or_changed_and_the_manifest_says_why() {
    let texts = prose(40, 20);
    let place = Place::new();
    place.documents("in/a.jsonl", &texts[..10]);
    place.documents("in/b.jsonl", &texts[10..20]);
    place.run(&[]).ok();
    assert_eq!(counts(&place, "out")[..3], [2, 0, 0]);

    // Today's file.
    place.documents("in/c.jsonl", &texts[20..30]);
    place.run(&[]).ok();
    let [made, kept, removed, scored, read] = counts(&place, "out");
    assert_eq!((made, kept, removed, read), (1, 2, 0, 30));
    assert!((1..=10).contains(&scored));
    let run = manifest(&place, "out/_right-reset").into_iter().rfind(|l| l["kind"] == "run").unwrap();
    assert_eq!(
        (&run["made"]["new"], &run["kept"][0]["input"], &run["kept"][0]["why"]),
        (&1.into(), &"a.jsonl".into(), &"same_time".into())
    );

    // Touched, renamed, changed.
    let touched = std::fs::File::options().append(true).open(place.path("in/a.jsonl")).unwrap();
    touched.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(5)).unwrap();
    std::fs::rename(place.path("in/b.jsonl"), place.path("in/renamed.jsonl")).unwrap();
    place.documents("in/c.jsonl", &texts[25..35]);
    place.run(&["--prune"]).ok();
    let [made, kept, removed, scored, read] = counts(&place, "out");
    assert_eq!((made, kept, removed, read), (2, 1, 1, 30), "the part of c has its old name");
    assert!(scored <= 5, "{scored} scored: those of the renamed file and the old ones of c are known");
    let expected = [("a.jsonl", "new"), ("b.jsonl", "new"), ("c.jsonl", "input_changed"), ("renamed.jsonl", "new")];
    assert_eq!(why(&place), expected.map(|(a, b)| (a.to_owned(), b.to_owned())).into());
    let lines = manifest(&place, "out/_right-reset");
    assert_eq!(lines.iter().rfind(|l| l["kind"] == "run").unwrap()["kept"][0]["why"], "same_bytes");
    assert_eq!(lines.iter().rfind(|l| l["kind"] == "removed").unwrap()["why"], "input_gone");

    // Another penalty, a lost file, and by force: no inference.
    place.run(&["--set", "segment.penalty=0.5"]).ok();
    assert_eq!(counts(&place, "out"), [3, 0, 0, 0, 30]);
    assert!(why(&place).iter().all(|(input, why)| input == "b.jsonl" || why == "settings_changed"));
    let name = place.data("out").into_keys().next().unwrap();
    std::fs::remove_file(place.path("out").join(name)).unwrap();
    place.run(&["--set", "segment.penalty=0.5"]).ok();
    assert_eq!((counts(&place, "out"), why(&place)["a.jsonl"].as_str()), ([1, 2, 0, 0, 30], "file_missing"));
    let before = place.data("out");
    place.run(&["--set", "segment.penalty=0.5", "--force"]).ok();
    assert_eq!((counts(&place, "out"), why(&place)["a.jsonl"].as_str()), ([3, 0, 0, 0, 30], "forced"));
    assert_eq!(place.data("out"), before);
}

#[test]
fn a_kill_inside_a_part_does_not_repeat_the_inference_that_was_done() {
    let place = Place::with_documents(&prose(3000, 60));
    let killed = place.command(&["run", "p.toml"]).env("FAILPOINTS", "after-timed-flush=return").output().unwrap();
    assert!(!killed.status.success(), "the run ended within the time between flushes");
    place.run(&[]).ok();
    let documents = &place.summary("out")["documents"];
    assert!(documents["from_cache"].as_u64().unwrap() > 100, "{documents}");
    assert_eq!(place.summary("out")["rows"]["chunked"], 3000);
}

#[test]
fn a_plan_says_what_a_run_would_do_and_writes_nothing() {
    let texts = prose(60, 20);
    let place = Place::new();
    place.documents("in/a.jsonl", &[&texts[..20], &texts[..5]].concat());
    let plan = |arguments: &[&str]| -> Value {
        let all = || ["in", "out"].map(|f| if place.path(f).exists() { everything(&place.path(f)) } else { BTreeMap::new() });
        let namespaces = || match place.path("cache").exists() {
            true => serde_json::from_slice::<Value>(&place.tool(&["cache", "stats", "p.toml"]).ok().stdout).unwrap()["namespaces"].clone(),
            false => Value::Null,
        };
        let before = (all(), namespaces());
        let found = place.tool(&[&["plan", "p.toml", "--json"], arguments].concat()).ok().stdout;
        assert!(before == (all(), namespaces()), "a plan wrote something");
        serde_json::from_slice(&found).unwrap()
    };
    let first = plan(&[]);
    assert_eq!((&first["missing"], &first["copies"], &first["parts_made"]["new"]), (&20.into(), &5.into(), &1.into()));
    assert!(first["tokens_per_second"].is_null() && first["missing_tokens"].as_u64().unwrap() > 500);
    assert!(!place.path("out").exists() && !place.path("cache").exists());
    place.run(&[]).ok();
    let tokens = place.summary("out")["documents"]["tokens"].as_u64().unwrap();
    assert_eq!(plan(&[])["parts_kept"], 1);

    place.documents("in/b.jsonl", &texts[20..]);
    let second = plan(&[]);
    assert_eq!((&second["parts_kept"], &second["parts_made"]["new"], &second["missing"]), (&1.into(), &1.into(), &40.into()));
    assert!(second["tokens_per_second"].as_f64().unwrap() > 0.0 && second["seconds"].as_f64().unwrap() > 0.0);
    place.run(&[]).ok();
    let guessed = second["missing_tokens"].as_f64().unwrap() / place.summary("out")["scoring"]["source_tokens"].as_f64().unwrap();
    assert!(tokens > 0 && (0.5..2.0).contains(&guessed), "{guessed}");

    let other = plan(&["--set", "segment.penalty=0.4"]);
    assert_eq!((&other["parts_made"]["settings_changed"], &other["missing"]), (&2.into(), &0.into()));
    assert_eq!(other["in_cache"].as_u64().unwrap() + other["not_needed"].as_u64().unwrap(), 65);
    let longer = plan(&["--set", "score.window=48"]);
    assert!(longer["missing"].as_u64().unwrap() > 40, "longer curves are not there");
    assert_eq!(plan(&["--force"])["parts_made"]["forced"], 2);
    std::fs::remove_file(place.path("in/b.jsonl")).unwrap();
    assert_eq!(plan(&["--prune"])["parts_removed"].as_array().unwrap().len(), 1);
    place.tool(&["plan", "p.toml", "--set", "score.window=48", "--set", "cache.on_miss=error"]).fails(1, "forbids inference");
    let text = String::from_utf8(place.tool(&["plan", "p.toml"]).ok().stdout).unwrap();
    assert!(text.contains("files      1\nparts      1 to keep, 0 to make"), "{text}");
}

#[test]
fn ranks_share_an_output_and_their_caches_come_together() {
    let texts = prose(90, 20);
    let place = Place::new();
    parquet(&place.path("in/a.parquet"), &texts[..60], 5);
    parquet(&place.path("in/b.parquet"), &texts[60..80], 100);
    place.run(&["--output", "single", "--set", "cache.path=single-cache"]).ok();
    let start = || -> Vec<std::process::Child> {
        let ranks = (0..4).map(|rank| {
            let arguments = ["run", "p.toml", "--rank", &rank.to_string(), "--world-size", "4"];
            place.command(&arguments).stderr(std::process::Stdio::piped()).spawn().unwrap()
        });
        ranks.collect()
    };
    let all = |children: Vec<std::process::Child>| children.into_iter().for_each(|c| drop(done(c.wait_with_output().unwrap()).ok()));
    all(start());
    assert_eq!(rows(&place, "out"), rows(&place, "single"));
    assert!(place.path("out/_SUCCESS").exists());
    let status: Value = serde_json::from_slice(&place.tool(&["status", "out", "--json"]).ok().stdout).unwrap();
    assert_eq!((&status["complete"], &status["world_size"], &status["rows"]["read"]), (&true.into(), &4.into(), &80.into()));
    assert_eq!(status["summary"]["summaries"], 4);

    // A new file moves nobody else's work.
    parquet(&place.path("in/c.parquet"), &texts[80..], 5);
    all(start());
    let parts = |key: &str| -> u64 {
        let of = |rank: u32| -> Value {
            serde_json::from_slice(&std::fs::read(place.path(&format!("out/_right-reset/rank-{rank:05}-of-00004/summary.json"))).unwrap())
                .unwrap()
        };
        (0..4).map(|rank| of(rank)[key].as_u64().unwrap()).sum()
    };
    assert_eq!((parts("parts_made"), parts("parts_kept")), (2, 13));

    // One rank is away.
    std::fs::remove_dir_all(place.path("out/_right-reset/rank-00002-of-00004")).unwrap();
    let text = String::from_utf8(place.tool(&["status", "out"]).ok().stdout).unwrap();
    assert!(text.contains("rank 2     has not begun"), "{text}");
    place.run(&[]).fails(1, "made by 4 ranks; go on with --world-size 4");
    place.run(&["--rank", "0", "--world-size", "5"]).fails(1, "made by 4 ranks");
    place.run(&["--rank", "0"]).fails(2, "--rank needs --world-size");
    place.run(&["--rank", "0", "--world-size", "4", "--set", "segment.target_mean_tokens=30"]).fails(1, "find the penalty by a run");

    // The four caches as one.
    let exported: Vec<String> = (0..4).map(|rank| format!("rank{rank}.parquet")).collect();
    for (rank, file) in exported.iter().enumerate() {
        place.tool(&["cache", "export", file, "--path", &format!("cache/rank-{rank:05}")]).ok();
    }
    let files: Vec<&str> = exported.iter().map(String::as_str).collect();
    place.tool(&[&["cache", "import", "--path", "joined"], &files[..]].concat()).ok();
    let joined = ["--set", "cache.path=joined", "--set", "cache.on_miss=error", "--set", "segment.penalty=0.4"];
    place.run(&[&joined[..], &["--output", "again"]].concat()).ok();
    let summary = place.summary("again");
    assert_eq!((&summary["rows"]["read"], &summary["scoring"]["tokenizer_loaded"]), (&90.into(), &false.into()));
    // So does a merge, into the cache of a run without ranks.
    place.tool(&["cache", "merge", "--path", "cache", "cache/rank-00000", "cache/rank-00001", "cache/rank-00002", "cache/rank-00003"]).ok();
    place.run(&["--set", "cache.on_miss=error", "--output", "merged"]).ok();
    assert_eq!(rows(&place, "merged").len(), place.summary("merged")["chunks"]["count"].as_u64().unwrap() as usize);
}

#[test]
fn an_import_takes_what_is_sound_and_says_what_it_left() {
    let place = Place::with_documents(&prose(30, 20));
    place.run(&[]).ok();
    place.tool(&["cache", "export", "whole.parquet", "--pipeline", "p.toml"]).ok();
    // One record with another payload than its checksum says, in a file that is otherwise as it was.
    let file = std::fs::File::open(place.path("whole.parquet")).unwrap();
    let reader = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let batches: Vec<RecordBatch> = reader.map(|b| b.unwrap()).collect();
    let names: Vec<String> = batches[0].schema().fields().iter().map(|f| f.name().clone()).collect();
    assert_eq!(names, ["text_hash", "kind", "namespace_hash", "namespace", "payload", "checksum"]);
    let whole = batches.iter().map(RecordBatch::num_rows).sum::<usize>();
    let write = |name: &str, version: Option<&str>, change: bool| {
        let schema = batches[0].schema();
        let words = version.map(|v| vec![KeyValue::new("right_reset.cache_export".into(), v.to_owned())]);
        let properties = WriterProperties::builder().set_key_value_metadata(words).build();
        let file = std::fs::File::create(place.path(name)).unwrap();
        let mut writer = ArrowWriter::try_new(file, Arc::clone(&schema), Some(properties)).unwrap();
        for batch in &batches {
            let mut columns = batch.columns().to_vec();
            if change {
                use arrow::array::{AsArray, BinaryArray};
                let payload = columns[4].as_binary::<i32>();
                let changed: BinaryArray = payload
                    .iter()
                    .enumerate()
                    .map(|(i, p)| {
                        let mut bytes = p.unwrap().to_vec();
                        if i % 10 == 3 {
                            bytes[0] ^= 1;
                        }
                        Some(bytes)
                    })
                    .collect();
                columns[4] = Arc::new(changed);
            }
            writer.write(&RecordBatch::try_new(Arc::clone(&schema), columns).unwrap()).unwrap();
        }
        writer.close().unwrap();
    };
    write("changed.parquet", Some("1"), true);
    write("later.parquet", Some("9"), false);
    write("foreign.parquet", None, false);
    let bad = (0..whole).filter(|i| i % 10 == 3).count();
    place
        .tool(&["cache", "import", "--path", "new", "changed.parquet", "later.parquet", "foreign.parquet", "none.parquet"])
        .fails(1, &format!("{bad} unsound records were left"))
        .fails(1, "later.parquet was left: an export of version 9")
        .fails(1, "foreign.parquet was left: not an export")
        .fails(1, "none.parquet was left: No such file");
    let stats: Value = serde_json::from_slice(&place.tool(&["cache", "stats", "--path", "new"]).ok().stdout).unwrap();
    let records: u64 = stats["namespaces"].as_array().unwrap().iter().map(|n| n["records"].as_u64().unwrap()).sum();
    assert_eq!(records as usize, whole - bad);
    let out = place.tool(&["cache", "import", "--path", "new", "whole.parquet"]).ok().stdout;
    assert_eq!(String::from_utf8(out).unwrap(), format!("{bad} records taken, {} were there\n", whole - bad));
    place.run(&["--set", "cache.path=new", "--set", "cache.on_miss=error", "--output", "again"]).ok();
    // A cut-off file.
    let bytes = std::fs::read(place.path("whole.parquet")).unwrap();
    place.write("cut.parquet", &bytes[..bytes.len() / 2]);
    place.tool(&["cache", "import", "--path", "new", "cut.parquet"]).fails(1, "cut.parquet was left");
    place.tool(&["cache", "export", "x.parquet", "--path", "nowhere"]).fails(1, "there is no score cache");
}

#[test]
fn prune_and_compact_give_space_back_and_lose_nothing_when_killed() {
    let place = Place::with_documents(&prose(60, 40));
    place.run(&[]).ok();
    place.run(&["--set", "score.window=48", "--output", "other"]).ok();
    let records = |place: &Place| -> u64 {
        let stats: Value = serde_json::from_slice(&place.tool(&["cache", "stats", "p.toml"]).ok().stdout).unwrap();
        stats["namespaces"].as_array().unwrap().iter().map(|n| n["records"].as_u64().unwrap()).sum()
    };
    let all = records(&place);
    for point in ["before-cache-swap", "between-cache-swap", "after-cache-swap"] {
        let trigger = format!("{point}=return");
        let killed = place.command(&["cache", "compact", "--pipeline", "p.toml"]).env("FAILPOINTS", &trigger).output().unwrap();
        assert!(!killed.status.success(), "{trigger}");
        assert_eq!(records(&place), all, "{trigger}");
    }
    place.tool(&["cache", "compact", "--pipeline", "p.toml"]).ok();
    assert_eq!(records(&place), all);
    place.run(&["--set", "cache.on_miss=error", "--force"]).ok();

    place.tool(&["cache", "prune", "--pipeline", "p.toml"]).fails(2, "say what to remove");
    let out = String::from_utf8(place.tool(&["cache", "prune", "--pipeline", "p.toml", "--unused-for", "1d"]).ok().stdout).unwrap();
    assert_eq!(out, "nothing to remove\n");
    let dry = ["cache", "prune", "--pipeline", "p.toml", "--readout", "rr", "--dry-run"];
    assert_eq!(String::from_utf8(place.tool(&dry).ok().stdout).unwrap().lines().count(), 2, "two windows");
    assert_eq!(records(&place), all);
    place.tool(&["cache", "prune", "--pipeline", "p.toml", "--readout", "rr"]).ok();
    assert_eq!(records(&place), 60, "edges stay");
    place.run(&["--set", "cache.on_miss=error", "--force"]).fails(1, "not in the score cache");
    let model = crate::tool::root().join("tests/tiny").to_string_lossy().into_owned();
    place.tool(&["cache", "prune", "--pipeline", "p.toml", "--model", &model]).ok();
    assert_eq!(records(&place), 0);
    place.run(&["--force"]).ok();
    assert_eq!(place.summary("out")["rows"]["chunked"], 60);
}

#[test]
fn what_an_older_version_wrote_still_opens() {
    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            let target = to.join(path.file_name().unwrap());
            if path.is_dir() {
                copy(&path, &target);
            } else {
                std::fs::copy(&path, target).unwrap();
            }
        }
    }
    let place = Place::new();
    for folder in ["in", "cache", "out"] {
        copy(&crate::tool::root().join("tests/old").join(folder), &place.path(folder));
    }
    let before = place.data("out");
    // The output folder: its part is kept, since the input's bytes are the same. The cache: converted, nothing is scored.
    place.run(&["--set", "cache.on_miss=error"]).ok();
    assert_eq!(counts(&place, "out"), [0, 1, 0, 0, 4]);
    place.run(&["--set", "cache.on_miss=error", "--force"]).ok();
    assert_eq!((counts(&place, "out"), place.data("out")), ([1, 0, 0, 0, 4], before));
    assert!(place.path("cache/v2").exists() && !place.path("cache/v1").exists());
}

#[test]
fn metrics_say_how_a_run_went() {
    let place = Place::with_documents(&prose(5, 20));
    place.run(&["--metrics", "m.prom"]).ok();
    let text = std::fs::read_to_string(place.path("m.prom")).unwrap();
    let mut values: BTreeMap<&str, f64> = BTreeMap::new();
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(values.insert(name, value.parse().unwrap()).is_none(), "{name} twice");
        assert!(text.contains(&format!("# TYPE {} gauge\n", name.split('{').next().unwrap())));
    }
    assert_eq!(values["right_reset_rows{outcome=\"chunked\"}"], 5.0);
    assert_eq!((values["right_reset_exit_code"], values["right_reset_parts{what=\"made\"}"]), (0.0, 1.0));
    place.write("in/b.jsonl", b"nonsense\n");
    place.run(&["--metrics", "m.prom"]).fails(1, "not a JSON object");
    let text = std::fs::read_to_string(place.path("m.prom")).unwrap();
    assert!(text.contains("right_reset_exit_code 1\n") && !text.contains("success_timestamp"), "{text}");
}

#[test]
fn every_example_pipeline_runs() {
    let place = Place::new();
    let pipelines = crate::tool::root().join("pipelines");
    let model = format!("model.name={}", crate::tool::root().join("tests/tiny").display());
    // The tiny model's context is too short for the last stage of the default.
    let run = |name: &str, cache: &str, variables: &[(&str, &str)], arguments: &[&str]| {
        let (file, cache) = (pipelines.join(name).to_string_lossy().into_owned(), format!("cache.path={}", place.path(cache).display()));
        let output = place.path(&name.replace(".toml", "")).to_string_lossy().into_owned();
        let common = ["run", &file, "--output", &output, "--set", &model, "--set", &cache, "--set", "preset=standard"];
        let stages = ["--set", "score.stages=[[16, 0.5], [32]]"];
        let mut command = place.command(&[&common[..], &stages, arguments].concat());
        command.envs(variables.iter().copied());
        done(command.output().unwrap()).ok()
    };
    let read = |output: &str| place.summary(output)["rows"]["read"].as_u64().unwrap();
    run("demo.toml", "demo-cache", &[], &[]);
    run("nightly.toml", "nightly-cache", &[], &["--metrics", "m.prom"]);
    assert!(read("demo") > 5 && read("nightly") == read("demo"));
    run("rechunk.toml", "nightly-cache", &[], &[]);
    assert_eq!((read("rechunk"), place.summary("rechunk")["documents"]["scored"].as_u64()), (read("nightly"), Some(0)));
    for task in ["4", "5", "6"] {
        let array = [("SLURM_ARRAY_TASK_ID", task), ("SLURM_ARRAY_TASK_MIN", "4"), ("SLURM_ARRAY_TASK_COUNT", "3")];
        run("slurm.toml", "slurm-cache", &array, &["--rank", "slurm"]);
    }
    let status: Value = serde_json::from_slice(&place.tool(&["status", "slurm", "--json"]).ok().stdout).unwrap();
    assert_eq!((&status["complete"], status["rows"]["read"].as_u64()), (&true.into(), Some(2 * read("demo"))));
    let listed =
        std::fs::read_dir(&pipelines).unwrap().filter(|e| e.as_ref().unwrap().path().extension().is_some_and(|e| e == "toml")).count();
    assert_eq!(listed, 4, "each pipeline is run here");
}
