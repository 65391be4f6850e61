//! Every input and output format, with the column types and shapes people have.

use std::fs::File;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, DictionaryArray, Int64Array, LargeStringArray, ListBuilder, RecordBatch, StringArray, StringBuilder, StringViewArray,
    StructArray,
};
use arrow::datatypes::{DataType, Field, Int32Type, Schema};
use arrow::ipc::reader::{FileReader, StreamReader};
use arrow::ipc::writer::{FileWriter, StreamWriter};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::tool::{Place, json_lines, prose};

fn write_parquet(place: &Place, name: &str, batch: &RecordBatch) {
    let mut writer = ArrowWriter::try_new(File::create(place.path(name)).unwrap(), batch.schema(), None).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

fn batch(text: ArrayRef, more: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable(std::iter::once(("text", text, true)).chain(more.into_iter().map(|(n, a)| (n, a, true))))
        .unwrap()
}

fn ipc_stream(batch: &RecordBatch) -> Vec<u8> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    writer.into_inner().unwrap()
}

/// (text, byte_start) of all chunks, in order.
fn pieces(place: &Place, output: &str) -> Vec<(String, i64)> {
    place.chunks(output).iter().map(|c| (c["text"].as_str().unwrap().to_owned(), c["byte_start"].as_i64().unwrap())).collect()
}

#[test]
fn all_text_types_and_containers_give_the_same_chunks() {
    let texts = prose(12, 12);
    let reference = Place::with_documents(&texts);
    reference.run(&[]).ok();
    let expected = pieces(&reference, "out");
    let dictionary: DictionaryArray<Int32Type> = texts.iter().map(String::as_str).collect();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("utf8", Arc::new(StringArray::from(texts.clone()))),
        ("large", Arc::new(LargeStringArray::from(texts.clone()))),
        ("view", Arc::new(StringViewArray::from_iter_values(&texts))),
        ("dictionary", Arc::new(dictionary)),
    ];
    for (name, text) in columns {
        let place = Place::new();
        let batch = batch(text, vec![]);
        write_parquet(&place, "in/a.parquet", &batch);
        place.run(&[]).ok();
        assert_eq!(pieces(&place, "out"), expected, "Parquet, {name}");

        let mut writer = FileWriter::try_new(File::create(place.path("b.arrow")).unwrap(), &batch.schema()).unwrap();
        writer.write(&batch).unwrap();
        writer.finish().unwrap();
        std::fs::write(place.path("c.arrows"), ipc_stream(&batch)).unwrap();
        for file in ["b.arrow", "c.arrows"] {
            place.run(&["--input", file, "--output", file.strip_suffix("s").map_or("outb", |_| "outc")]).ok();
        }
        assert_eq!(pieces(&place, "outb"), expected, "Arrow file, {name}");
        assert_eq!(pieces(&place, "outc"), expected, "Arrow stream, {name}");
    }
}

#[test]
fn standard_input_is_recognised_and_standard_output_is_clean() {
    let texts = prose(8, 12);
    let place = Place::with_documents(&texts);
    place.run(&[]).ok();
    let expected = pieces(&place, "out");
    let plain = std::fs::read(place.path("in/a.jsonl")).unwrap();
    let table = batch(Arc::new(StringArray::from(texts)), vec![]);
    write_parquet(&place, "t.parquet", &table);
    let inputs = [
        ("jsonl", plain.clone()),
        ("zst", zstd::encode_all(&plain[..], 1).unwrap()),
        ("ipc", ipc_stream(&table)),
        ("parquet", std::fs::read(place.path("t.parquet")).unwrap()),
    ];
    for (name, bytes) in inputs {
        let done = place.tool_with_input(&["run", "p.toml", "--input", "-", "--output", "-"], &bytes).ok();
        let rows = json_lines(&done.stdout);
        let found: Vec<_> = rows.iter().map(|c| (c["text"].as_str().unwrap().to_owned(), c["byte_start"].as_i64().unwrap())).collect();
        assert_eq!(found, expected, "{name}");
        assert!(done.stderr.contains("rows") && rows[0]["source_file"] == "stdin");
    }
    let done = place.tool_with_input(&["run", "p.toml", "--input", "-", "--output", "-", "--set", "output.format=arrow"], &plain).ok();
    let rows: usize = StreamReader::try_new(&done.stdout[..], None).unwrap().map(|b| b.unwrap().num_rows()).sum();
    assert_eq!(rows, expected.len());
    place.tool_with_input(&["run", "p.toml", "--input", "-", "--output", "folder"], &plain).ok();
    assert_eq!(pieces(&place, "folder"), expected);
}

#[test]
fn pass_through_keeps_any_arrow_type() {
    let texts = prose(5, 12);
    let place = Place::new();
    let mut tags = ListBuilder::new(StringBuilder::new());
    for i in 0..5 {
        tags.append_option((i != 2).then_some([Some("a"), None]));
    }
    let inner: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None, Some(3), Some(4), Some(5)]));
    let nested = StructArray::from(vec![(Arc::new(Field::new("n", DataType::Int64, true)), inner)]);
    let kind: DictionaryArray<Int32Type> = vec!["x", "y", "x", "y", "x"].into_iter().collect();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("key", Arc::new(Int64Array::from(vec![7, 8, 9, 10, 11]))),
        ("tags", Arc::new(tags.finish())),
        ("nested", Arc::new(nested)),
        ("kind", Arc::new(kind)),
    ];
    write_parquet(&place, "in/a.parquet", &batch(Arc::new(StringArray::from(texts)), columns));
    let common = ["--set", "input.id_column=key", "--set", "input.pass_through=\"all\""];
    place.run(&[&common[..], &["--set", "output.format=parquet"]].concat()).ok();
    let file = place.path("out").join(place.data("out").keys().next().unwrap());
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(file).unwrap()).unwrap();
    let schema = builder.schema().clone();
    assert_eq!(schema.field_with_name("doc_id").unwrap().data_type(), &DataType::Int64);
    assert_eq!(schema.field_with_name("kind").unwrap().data_type(), &DataType::Utf8, "dictionaries are decoded");
    assert!(matches!(schema.field_with_name("tags").unwrap().data_type(), DataType::List(_)));
    let names: Vec<&str> = builder.metadata().file_metadata().key_value_metadata().unwrap().iter().map(|k| k.key.as_str()).collect();
    for key in ["right_reset.model", "right_reset.weights", "right_reset.tokenizer", "right_reset.score", "right_reset.segment"] {
        assert!(names.contains(&key), "{key} in {names:?}");
    }
    let rows = builder.build().unwrap().map(|b| b.unwrap()).collect::<Vec<_>>();
    assert!(rows.iter().map(RecordBatch::num_rows).sum::<usize>() >= 5);
    place.run(&[&common[..], &["--set", "output.format=arrow", "--output", "outa"]].concat()).ok();
    let file = place.path("outa").join(place.data("outa").keys().next().unwrap());
    assert!(FileReader::try_new(File::open(file).unwrap(), None).unwrap().all(|b| b.unwrap().column_by_name("nested").is_some()));
    // A clash of names is an error before anything is read.
    let clash: Vec<(&str, ArrayRef)> = vec![("chunk_id", Arc::new(Int64Array::from(vec![1])))];
    write_parquet(&place, "clash.parquet", &batch(Arc::new(StringArray::from(vec!["x"])), clash));
    place
        .run(&["--set", "input.pass_through=\"all\"", "--input", "clash.parquet", "--output", "c"])
        .fails(1, "has the name of an output column");
}

#[test]
fn the_first_file_fixes_the_types_and_later_ones_are_cast_or_refused() {
    let place = Place::new();
    let with = |values: ArrayRef| batch(Arc::new(StringArray::from(vec!["one text"])), vec![("v", values)]);
    write_parquet(&place, "in/a.parquet", &with(Arc::new(Int64Array::from(vec![1_i64 << 40]))));
    write_parquet(&place, "in/b.parquet", &with(Arc::new(arrow::array::Int32Array::from(vec![5]))));
    let pass = ["--set", "input.pass_through=[\"v\"]"];
    place.run(&pass).ok();
    let values: Vec<i64> = place.chunks("out").iter().map(|c| c["v"].as_i64().unwrap()).collect();
    assert_eq!(values, [1 << 40, 5]);
    write_parquet(&place, "in/c.parquet", &with(Arc::new(arrow::array::Float64Array::from(vec![0.5]))));
    place.run(&pass).fails(1, "c.parquet: column \"v\" is Float64 here but Int64 in the first file");
    std::fs::remove_file(place.path("in/c.parquet")).unwrap();
    let schema = Schema::new(vec![Field::new("body", DataType::Utf8, true)]);
    let other = RecordBatch::try_new(Arc::new(schema), vec![Arc::new(StringArray::from(vec!["x"])) as ArrayRef]).unwrap();
    write_parquet(&place, "in/d.parquet", &other);
    place.run(&pass).fails(1, "column \"text\" is missing; the file has body");
    write_parquet(
        &place,
        "in/d.parquet",
        &RecordBatch::try_from_iter([("text", Arc::new(Int64Array::from(vec![1])) as ArrayRef)]).unwrap(),
    );
    place.run(&[]).fails(1, "holds Int64, not text");
    place.write("in/d.parquet", b"PAR1 not really");
    place.run(&[]).fails(1, "not readable as Parquet");
}

#[test]
fn jsonl_columns_have_declared_types_or_hold_json() {
    let place = Place::new();
    place.write(
        "in/a.jsonl",
        b"{\"text\":\"one\",\"year\":1999,\"meta\":{\"a\":[1,2]}}\n{\"text\":\"two\",\"meta\":null}\n{\"text\":\"three\",\"year\":\"x\"}\n",
    );
    let settings = ["--set", "input.columns={ year = \"int64\" }", "--set", "input.pass_through=[\"year\", \"meta\"]"];
    place.run(&settings).fails(1, "row 2: \"year\" is not Int64");
    place.run(&[&settings[..], &["--set", "input.on_bad_row=skip"]].concat()).ok();
    let chunks = place.chunks("out");
    assert_eq!((chunks[0]["year"].as_i64(), chunks[0]["meta"].as_str()), (Some(1999), Some("{\"a\":[1,2]}")));
    assert!(chunks[1]["year"].is_null() && chunks[1]["meta"].is_null());
}

#[test]
fn partition_folders_are_mirrored_and_an_empty_file_gives_an_empty_part() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("in/date=2026-01-02/x")).unwrap();
    place.documents("in/date=2026-01-02/x/a.jsonl", &prose(2, 3));
    place.write("in/empty.jsonl", b"");
    place.run(&[]).ok();
    let names: Vec<String> = place.data("out").into_keys().collect();
    assert!(names[0].starts_with("date=2026-01-02/a-") && names[0].ends_with("-00000.jsonl"), "{names:?}");
    assert!(names[1].starts_with("empty-"), "{names:?}");
}
