//! Input as it comes: damaged, odd, huge. A clear error or the policy for bad rows, and no row lost.

use std::io::Write;
use std::sync::Arc;

use arrow::array::{ArrayRef, BinaryArray, Int64Array, LargeStringArray, NullArray, RecordBatch, StringArray, new_empty_array};
use arrow::datatypes::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;

use crate::nightly::parquet;
use crate::tool::{Done, Place, json_lines, prose};

fn write(place: &Place, name: &str, batch: &RecordBatch) {
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(7)).build();
    let mut writer = ArrowWriter::try_new(std::fs::File::create(place.path(name)).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

fn one(name: &str, column: ArrayRef) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable([(name, column, true)]).unwrap()
}

/// A run on one file alone.
fn run(place: &Place, name: &str) -> Done {
    let _ = std::fs::remove_dir_all(place.path("out"));
    place.run(&["--input", name])
}

fn rows(place: &Place) -> [u64; 5] {
    let rows = &place.summary("out")["rows"];
    ["read", "chunked", "empty", "null", "bad"].map(|k| rows[k].as_u64().unwrap())
}

#[test]
fn damaged_parquet_is_named_or_read_but_never_half_read() {
    let texts = prose(60, 10);
    let place = Place::new();
    parquet(&place.path("a.parquet"), &texts, 20);
    let whole = std::fs::read(place.path("a.parquet")).unwrap();
    for cut in [0, 3, 4, 100, whole.len() / 2, whole.len() - 9, whole.len() - 1] {
        place.write("b.parquet", &whole[..cut]);
        run(&place, "b.parquet").fails(1, "b.parquet: not readable as Parquet");
        assert!(!place.path("out/_SUCCESS").exists());
    }
    let mut state = 77_u64;
    let (mut refused, mut read) = (0, 0);
    for _ in 0..60 {
        let mut bytes = whole.clone();
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // Half of the flips hit the metadata at the end.
        let span = if state >> 63 == 0 { bytes.len() } else { 2000.min(bytes.len()) };
        let at = bytes.len() - 1 - (state >> 20) as usize % span;
        bytes[at] ^= 1 << (state >> 10 & 7);
        place.write("b.parquet", &bytes);
        let _ = std::fs::remove_dir_all(place.path("out"));
        let out = place.command(&["run", "p.toml", "--input", "b.parquet", "--set", "input.on_bad_row=skip"]).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        match out.status.code() {
            Some(0) => {
                // Damage that still reads: every row is accounted for.
                let [all, chunked, empty, null, bad] = rows(&place);
                assert_eq!(all, chunked + empty + null + bad, "byte {at}");
                read += 1;
            }
            Some(1) => {
                assert!(text.contains("b.parquet") || text.contains("column"), "byte {at}:\n{text}");
                assert!(!place.path("out/_SUCCESS").exists());
                refused += 1;
            }
            other => panic!("byte {at}: {other:?}\n{text}"),
        }
    }
    assert!(refused > 5 && read > 5, "{refused} refused, {read} read");
}

#[test]
fn parquet_without_rows_groups_or_text_is_told_apart() {
    let place = Place::new();
    write(&place, "none.parquet", &one("other", Arc::new(Int64Array::from(vec![1]))));
    run(&place, "none.parquet").fails(1, "column \"text\"").fails(1, "other");
    write(&place, "binary.parquet", &one("text", Arc::new(BinaryArray::from_vec(vec![b"abc", b"\xff\xfe"]))));
    run(&place, "binary.parquet").fails(1, "column \"text\"").fails(1, "Binary");
    write(&place, "null.parquet", &one("text", Arc::new(StringArray::from(vec![None::<&str>; 5]))));
    run(&place, "null.parquet").ok();
    assert_eq!(rows(&place), [5, 0, 0, 5, 0]);
    write(&place, "nulltype.parquet", &one("text", Arc::new(NullArray::new(5))));
    let untyped = run(&place, "nulltype.parquet");
    assert!(
        untyped.code == 1 && untyped.stderr.contains("column \"text\"") || untyped.code == 0 && rows(&place)[3] == 5,
        "{}",
        untyped.stderr
    );
    // No rows, and not even a row group.
    write(&place, "empty.parquet", &one("text", new_empty_array(&DataType::Utf8)));
    run(&place, "empty.parquet").ok();
    assert_eq!(rows(&place), [0; 5]);
    assert!(place.path("out/_SUCCESS").exists() && place.data("out").len() == 1, "an empty part stands for the file");
    place.run(&["--input", "empty.parquet", "--output", "ranked", "--rank", "0", "--world-size", "1"]).ok();
}

#[test]
fn ten_thousand_columns_and_rows_of_100_mb() {
    let place = Place::new();
    let text: ArrayRef = Arc::new(StringArray::from(prose(3, 10)));
    let other: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
    let mut fields = vec![Field::new("text", DataType::Utf8, true)];
    fields.extend((0..10_000).map(|i| Field::new(format!("c{i}"), DataType::Int64, true)));
    let columns = std::iter::once(text).chain(std::iter::repeat_n(other, 10_000)).collect();
    write(&place, "wide.parquet", &RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap());
    run(&place, "wide.parquet").ok();
    assert_eq!(rows(&place)[1], 3);

    // More text than a document may have, in both formats; and as one document where it may.
    let long = "word ".repeat(20 << 20);
    let batch = one("text", Arc::new(LargeStringArray::from(vec![long.as_str(), "short text", long.as_str()])));
    write(&place, "long.parquet", &batch);
    let skip = ["--set", "input.on_bad_row=skip", "--set", "input.max_document_bytes=1000000"];
    place.run(&[&["--input", "long.parquet", "--output", "long"][..], &skip].concat()).ok();
    let summary = place.summary("long");
    assert_eq!((&summary["rows"]["bad"], &summary["rows"]["chunked"]), (&2.into(), &1.into()));
    assert!(summary["peak_memory_bytes"].as_u64().unwrap() < 1 << 30, "{}", summary["peak_memory_bytes"]);
    let mut lines = std::fs::File::create(place.path("long.jsonl")).unwrap();
    for text in [long.as_str(), "short text"] {
        writeln!(lines, "{}", serde_json::json!({ "text": text })).unwrap();
    }
    place.run(&[&["--input", "long.jsonl", "--output", "lines"][..], &skip, &["--set", "input.max_line_bytes=2000000"]].concat()).ok();
    assert_eq!(place.summary("lines")["rows"]["bad"], 1);
}

#[test]
fn odd_json_follows_the_policy_line_by_line() {
    let place = Place::new();
    let mut lines: Vec<Vec<u8>> = vec![
        b"{\"id\":\"ok\",\"text\":\"a plain line\"}".to_vec(),
        b"{\"id\":\"bad1\",\"text\":\"\xff\xfe\"}".to_vec(),
        b"{\"id\":\"bad2\",\"text\":\"\\ud800 alone\"}".to_vec(),
        b"{\"id\":\"pair\",\"text\":\"\\ud83d\\ude00 together\"}\r".to_vec(),
        format!("{{\"id\":\"bad3\",\"text\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000)).into_bytes(),
        format!("{{\"id\":\"deep\",\"text\":\"x\",\"other\":{}{}}}", "[".repeat(100), "]".repeat(100)).into_bytes(),
        b"{\"id\":\"bad4\",\"text\":\"cut".to_vec(),
        b"[1,2,3]".to_vec(),
        b"".to_vec(),
        b"{\"id\":\"twice\",\"text\":\"first\"}".to_vec(),
        b"{\"id\":\"twice\",\"text\":\"second\"}".to_vec(),
        b"{\"id\":\"nul\",\"text\":\"a\\u0000b\"}".to_vec(),
    ];
    lines[0].splice(0..0, *b"\xef\xbb\xbf");
    let plain = lines.join(&b'\n');
    let policy = ["--set", "input.on_bad_row=quarantine", "--set", "input.id_column=id"];
    let check = |name: &str, bytes: &[u8], times: u64| {
        place.write(name, bytes);
        let _ = std::fs::remove_dir_all(place.path("out"));
        place.run(&[&["--input", name][..], &policy].concat()).ok();
        assert_eq!(rows(&place), [11 * times, 6 * times, 0, 0, 5 * times], "{name}");
        let quarantined = json_lines(&std::fs::read(place.path("out/_right-reset/quarantine.jsonl")).unwrap());
        let rows: Vec<u64> = quarantined.iter().map(|l| l["source_row"].as_u64().unwrap()).collect();
        assert_eq!(rows[..5], [1, 2, 4, 6, 7], "{name}");
        let ids: Vec<String> = place.chunks("out").iter().map(|c| c["doc_id"].as_str().unwrap().to_owned()).collect();
        assert_eq!(ids[..6], ["ok", "pair", "deep", "twice", "twice", "nul"], "{name}");
    };
    check("odd.jsonl", &plain, 1);
    // Two gzip members, as `cat a.gz b.gz` makes them.
    let pack = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let second = [b"\n", &plain[3..]].concat();
    check("odd.jsonl.gz", &[pack(&plain), pack(&second)].concat(), 2);
    let cut = pack(&plain);
    place.write("cut.jsonl.gz", &cut[..cut.len() - 12]);
    run(&place, "cut.jsonl.gz").fails(1, "cut.jsonl.gz");
}

#[test]
fn ids_of_every_type_come_back_as_they_were() {
    let place = Place::new();
    let texts = prose(3, 10);
    let text: ArrayRef = Arc::new(StringArray::from(texts));
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1, 1, 3]));
    let cast = |to: &DataType| arrow::compute::cast(&numbers, to).unwrap();
    let mut ids: Vec<ArrayRef> = [DataType::Int8, DataType::Int16, DataType::Int32, DataType::Int64].iter().map(cast).collect();
    ids.extend([DataType::UInt8, DataType::UInt16, DataType::UInt32, DataType::UInt64].iter().map(cast));
    let strings: ArrayRef = Arc::new(StringArray::from(vec!["1", "1", "3"]));
    ids.extend([DataType::Utf8, DataType::LargeUtf8, DataType::Utf8View].iter().map(|to| arrow::compute::cast(&strings, to).unwrap()));
    let keys = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    ids.push(arrow::compute::cast(&strings, &keys).unwrap());
    for id in ids {
        let kind = id.data_type().to_string();
        write(&place, "ids.parquet", &RecordBatch::try_from_iter([("id", id), ("text", Arc::clone(&text))]).unwrap());
        let _ = std::fs::remove_dir_all(place.path("out"));
        place.run(&["--input", "ids.parquet", "--set", "input.id_column=id"]).ok();
        let found: Vec<String> = place.chunks("out").iter().map(|c| c["doc_id"].to_string().replace('"', "")).collect();
        let mut distinct = found.clone();
        distinct.dedup();
        assert_eq!(distinct, ["1", "3"], "{kind}");
    }
}
