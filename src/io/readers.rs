//! Readers: Parquet, JSONL and Arrow IPC as batches of bounded size.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, LargeStringArray, RecordBatch, StringBuilder};
use arrow::datatypes::{Field, Schema};
use arrow::ipc::reader::{FileReader, StreamReader};
use arrow::json::ReaderBuilder;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::basic::Encoding;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use serde_json::value::RawValue;

use super::convert::{ColumnPlan, ColumnSettings, SourceBatch, assemble, too_long};
use super::{FileFormat, InputFile, IoError, at};

/// Bytes of text that a batch aims for.
const BATCH_BYTES: usize = 4 << 20;
/// Rows a batch has at most.
const BATCH_ROWS: usize = 2048;

/// The bytes of an input.
type Bytes = Box<dyn BufRead + Send>;

/// Limits on what is read.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of a document.
    pub document: u64,
    /// Bytes of a JSONL line.
    pub line: u64,
}

enum Inner {
    Parquet { reader: ParquetRecordBatchReader, next: u64 },
    Jsonl { reader: Bytes, line: u64, started: bool },
    Arrow { batches: Box<dyn Iterator<Item = Result<RecordBatch, arrow::error::ArrowError>> + Send>, next: u64, rest: Option<RecordBatch> },
}

/// An open input file.
pub struct SourceReader {
    path: PathBuf,
    plan: Arc<ColumnPlan>,
    limits: Limits,
    skip_until: u64,
    inner: Inner,
}

fn format_error<'a>(path: &'a Path, format: &'static str) -> impl Fn(&dyn std::fmt::Display) -> IoError + use<'a> {
    move |e| IoError::Format { path: path.to_owned(), format, reason: e.to_string() }
}

/// A file on disk or standard input, spooled where a format needs to jump.
fn open(file: &InputFile) -> Result<(Option<File>, Bytes, FileFormat), IoError> {
    if !file.is_stdin() {
        let handle = File::open(&file.path).map_err(at(&file.path))?;
        let reader = Box::new(BufReader::with_capacity(1 << 20, handle.try_clone().map_err(at(&file.path))?));
        return Ok((Some(handle), reader, file.format.unwrap_or(FileFormat::Jsonl)));
    }
    let mut reader = BufReader::with_capacity(1 << 20, std::io::stdin());
    let head = reader.fill_buf().map_err(at(&file.path))?;
    let format = file.format.unwrap_or(match head {
        [b'P', b'A', b'R', b'1', ..] => FileFormat::Parquet,
        [0xff, 0xff, 0xff, 0xff, ..] | [b'A', b'R', b'R', b'O', b'W', b'1', ..] => FileFormat::Arrow,
        _ => FileFormat::Jsonl,
    });
    if format == FileFormat::Parquet || head.starts_with(b"ARROW1") {
        let mut spool = tempfile::tempfile().map_err(at(&file.path))?;
        std::io::copy(&mut reader, &mut spool).and_then(|_| spool.flush()).map_err(at(&file.path))?;
        spool.rewind().map_err(at(&file.path))?;
        let again = Box::new(BufReader::new(spool.try_clone().map_err(at(&file.path))?));
        return Ok((Some(spool), again, format));
    }
    Ok((None, Box::new(reader), format))
}

/// Unpacks gzip (all members) and zstd (all frames), known by their first bytes.
fn unpacked(mut reader: Bytes, path: &Path) -> Result<Bytes, IoError> {
    let head = reader.fill_buf().map_err(at(path))?;
    Ok(match head {
        [0x1f, 0x8b, ..] => Box::new(BufReader::with_capacity(1 << 18, flate2::bufread::MultiGzDecoder::new(reader))),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let decoder = zstd::stream::read::Decoder::with_buffer(reader).map_err(at(path))?;
            Box::new(BufReader::with_capacity(1 << 18, decoder))
        }
        _ => reader,
    })
}

impl SourceReader {
    /// Opens a file to read some of its rows (an end past the last row is that of the file; only Parquet knows another). The first file of a run has no plan
    /// yet and makes it.
    pub(crate) fn open(
        file: &InputFile,
        plan: Option<&Arc<ColumnPlan>>,
        settings: &ColumnSettings<'_>,
        limits: Limits,
        rows: Range<u64>,
    ) -> Result<Self, IoError> {
        let path = file.path.clone();
        let (handle, reader, format) = open(file)?;
        let plan_for = |schema: Option<&Schema>| -> Result<Arc<ColumnPlan>, IoError> {
            // A later file must have usable columns of its own; its types are cast to the first one's.
            let own = Arc::new(ColumnPlan::new(settings, schema, &path)?);
            Ok(plan.cloned().unwrap_or(own))
        };
        let (plan, inner) = match (format, handle) {
            (FileFormat::Parquet, Some(handle)) => {
                let bad = format_error(&path, "Parquet");
                let builder = ParquetRecordBatchReaderBuilder::try_new(handle).map_err(|e| bad(&e))?;
                let plan = plan_for(Some(builder.schema()))?;
                let names: Vec<&str> = builder.schema().fields().iter().map(|f| f.name().as_str()).filter(|n| plan.wants(n)).collect();
                let mask = ProjectionMask::roots(
                    builder.parquet_schema(),
                    builder.schema().fields().iter().enumerate().filter(|(_, f)| names.contains(&f.name().as_str())).map(|(i, _)| i),
                );
                let batch = batch_rows(builder.metadata(), &names);
                let groups = groups_of(builder.metadata());
                // Only the row groups that hold wanted rows are opened.
                let wanted: Vec<usize> = (0..groups.len()).filter(|&g| groups[g].end > rows.start && groups[g].start < rows.end).collect();
                let begin = wanted.first().map_or(rows.start, |&g| groups[g].start);
                let next = rows.start.max(begin);
                let end = groups.last().map_or(0, |g| g.end).min(rows.end);
                let builder =
                    builder.with_projection(mask).with_batch_size(batch).with_row_groups(wanted).with_offset((next - begin) as usize);
                let reader = builder.with_limit(end.saturating_sub(next) as usize).build().map_err(|e| bad(&e))?;
                (plan, Inner::Parquet { reader, next })
            }
            (FileFormat::Arrow, handle) => {
                let bad = format_error(&path, "Arrow IPC");
                let mut reader = reader;
                let is_file = reader.fill_buf().map_err(at(&path))?.starts_with(b"ARROW1");
                if let (true, Some(mut handle)) = (is_file, handle) {
                    handle.seek(SeekFrom::Start(0)).map_err(at(&path))?;
                    let reader = FileReader::try_new(BufReader::new(handle), None).map_err(|e| bad(&e))?;
                    (plan_for(Some(&reader.schema()))?, Inner::Arrow { batches: Box::new(reader), next: 0, rest: None })
                } else {
                    let reader = StreamReader::try_new(reader, None).map_err(|e| bad(&e))?;
                    (plan_for(Some(&reader.schema()))?, Inner::Arrow { batches: Box::new(reader), next: 0, rest: None })
                }
            }
            (_, _) => (plan_for(None)?, Inner::Jsonl { reader: unpacked(reader, &path)?, line: 0, started: false }),
        };
        Ok(Self { path, plan, limits, skip_until: rows.start, inner })
    }

    /// Opens a file to read a text column and some others, none of them typed beforehand.
    ///
    /// # Errors
    /// [`IoError`] if the file cannot be read or lacks a column.
    pub fn open_columns(file: &InputFile, text: &str, others: &[&str]) -> Result<Self, IoError> {
        let others: Vec<String> = others.iter().map(|c| (*c).to_owned()).collect();
        let columns = Default::default();
        let settings = ColumnSettings { text, id: None, count: None, pass_through: Some(&others), columns: &columns };
        Self::open(file, None, &settings, Limits { document: u64::MAX, line: u64::MAX }, 0..u64::MAX)
    }

    /// The columns it gives.
    #[must_use]
    pub fn plan(&self) -> &Arc<ColumnPlan> {
        &self.plan
    }

    /// The next rows, or `None` at the end.
    ///
    /// # Errors
    /// [`IoError`] if the file cannot be read on. A bad JSONL line is a bad row of the batch instead.
    pub fn next_batch(&mut self) -> Result<Option<SourceBatch>, IoError> {
        match &mut self.inner {
            Inner::Parquet { reader, next } => {
                let Some(batch) = reader.next() else {
                    return Ok(None);
                };
                let batch = batch.map_err(|e| format_error(&self.path, "Parquet")(&e))?;
                let first = *next;
                *next += batch.num_rows() as u64;
                self.plan.convert(&batch, first, self.limits.document, &self.path).map(Some)
            }
            Inner::Arrow { batches, next, rest } => loop {
                let batch = match rest.take() {
                    Some(batch) => batch,
                    None => match batches.next() {
                        Some(batch) => batch.map_err(|e| format_error(&self.path, "Arrow IPC")(&e))?,
                        None => return Ok(None),
                    },
                };
                let rows = batch.num_rows() as u64;
                let skip = self.skip_until.saturating_sub(*next).min(rows);
                let average = batch.get_array_memory_size() / batch.num_rows().max(1);
                let take = ((BATCH_BYTES / average.max(1)).clamp(1, BATCH_ROWS) as u64).min(rows - skip);
                let first = *next + skip;
                *next = first + take;
                if skip + take < rows {
                    *rest = Some(batch.slice((skip + take) as usize, (rows - skip - take) as usize));
                }
                if take > 0 {
                    let batch = batch.slice(skip as usize, take as usize);
                    return self.plan.convert(&batch, first, self.limits.document, &self.path).map(Some);
                }
            },
            Inner::Jsonl { reader, line, started } => {
                let mut lines = Vec::new();
                let mut bytes = 0;
                while bytes < BATCH_BYTES && lines.len() < BATCH_ROWS {
                    let Some(content) = read_line(reader.as_mut(), self.limits.line).map_err(at(&self.path))? else {
                        break;
                    };
                    let number = *line;
                    *line += 1;
                    let content = match content {
                        Line::Bytes(mut content) => {
                            if !std::mem::replace(started, true) && content.starts_with(b"\xef\xbb\xbf") {
                                content.drain(..3);
                            }
                            if content.iter().all(u8::is_ascii_whitespace) {
                                continue;
                            }
                            Ok(content)
                        }
                        Line::TooLong(length) => {
                            Err(format!("the line has {length} bytes, more than input.max_line_bytes = {}", self.limits.line))
                        }
                    };
                    if number >= self.skip_until {
                        bytes += content.as_ref().map_or(0, Vec::len);
                        lines.push((number, content));
                    }
                }
                if lines.is_empty() { Ok(None) } else { json_batch(&self.plan, lines, self.limits.document, &self.path).map(Some) }
            }
        }
    }
}

/// Physical rows of each row group.
fn groups_of(metadata: &ParquetMetaData) -> Vec<Range<u64>> {
    let rows = metadata.row_groups().iter().map(|group| group.num_rows().max(0) as u64);
    rows.scan(0, |start, rows| Some(std::mem::replace(start, *start + rows)..*start)).collect()
}

/// The units in which ranks share a file: the rows of each row group of a Parquet file; of another file, and of one without row groups, all rows.
///
/// # Errors
/// [`IoError`] if it cannot be read.
pub fn units(file: &InputFile) -> Result<Vec<Range<u64>>, IoError> {
    let mut all = Vec::new();
    if file.format != Some(FileFormat::Parquet) || file.is_stdin() {
        all.push(0..u64::MAX);
        return Ok(all);
    }
    let handle = File::open(&file.path).map_err(at(&file.path))?;
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&handle).map_err(|e| format_error(&file.path, "Parquet")(&e))?;
    all = groups_of(&metadata);
    if all.is_empty() {
        all.push(0..u64::MAX);
    }
    Ok(all)
}

/// Rows of a Parquet batch: as many as make about [`BATCH_BYTES`], from the metadata of the largest row group.
fn batch_rows(metadata: &ParquetMetaData, columns: &[&str]) -> usize {
    let per_row = metadata.row_groups().iter().map(|group| {
        let rows = group.num_rows().max(1) as usize;
        let bytes = group.columns().iter().filter(|c| columns.contains(&c.column_path().parts()[0].as_str())).map(|column| {
            let packed = column.uncompressed_size().max(0) as usize;
            match column.unencoded_byte_array_data_bytes() {
                Some(bytes) => bytes.max(0) as usize / rows,
                // A value of a dictionary is no longer than the dictionary, and it may be on every row.
                None if column.encodings().any(|e| matches!(e, Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY)) => {
                    (packed / rows).max(packed.min(16 << 10))
                }
                None => packed / rows,
            }
        });
        bytes.sum::<usize>()
    });
    (BATCH_BYTES / per_row.max().unwrap_or(0).max(1)).clamp(1, BATCH_ROWS)
}

enum Line {
    Bytes(Vec<u8>),
    TooLong(u64),
}

/// Reads a line without its line feed; of a line longer than `max` only the length is kept.
fn read_line(reader: &mut dyn BufRead, max: u64) -> std::io::Result<Option<Line>> {
    let mut line = Vec::new();
    let mut length = 0_u64;
    loop {
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            if length == 0 {
                return Ok(None);
            }
            break;
        }
        let (part, used, ends) = match buffer.iter().position(|&b| b == b'\n') {
            Some(at) => (&buffer[..at], at + 1, true),
            None => (buffer, buffer.len(), false),
        };
        length += part.len() as u64;
        if length <= max {
            line.extend_from_slice(part);
        } else {
            line = Vec::new();
        }
        // A line feed alone still is a line.
        length += u64::from(ends && length == 0);
        reader.consume(used);
        if ends {
            break;
        }
    }
    Ok(Some(if length > max { Line::TooLong(length) } else { Line::Bytes(line) }))
}

type Object = std::collections::HashMap<String, Box<RawValue>>;

fn json_batch(plan: &ColumnPlan, lines: Vec<(u64, Result<Vec<u8>, String>)>, max: u64, path: &Path) -> Result<SourceBatch, IoError> {
    let (mut rows, mut texts, mut objects) = (Vec::new(), Vec::new(), Vec::new());
    for (number, line) in lines {
        rows.push(number);
        let parsed = line.and_then(|bytes| {
            let text = std::str::from_utf8(&bytes).map_err(|e| format!("not UTF-8 at byte {} of the line", e.valid_up_to()))?;
            serde_json::from_str::<Object>(text).map_err(|e| format!("not a JSON object: {e}"))
        });
        let (text, object) = match parsed {
            Ok(object) => (json_text(&object, &plan.text, max), object),
            Err(reason) => (Err(reason), Object::new()),
        };
        texts.push(text);
        objects.push(object);
    }
    let mut columns = Vec::new();
    for field in plan.schema.fields() {
        let is_text_id = plan.id.as_ref() == Some(field.name()) && !plan.typed.contains_key(field.name());
        columns.push(json_column(
            field,
            is_text_id,
            plan.typed.contains_key(field.name()) || plan.count.as_ref() == Some(field.name()),
            &objects,
            &mut texts,
        ));
    }
    let count = rows.len();
    let bad = texts.iter_mut().enumerate().filter_map(|(i, text)| Some((i, std::mem::take(text.as_mut().err()?)))).collect();
    let texts: LargeStringArray = texts.into_iter().map(|text| text.unwrap_or_default()).collect();
    Ok(SourceBatch { rows, texts, bad, columns: assemble(&plan.schema, columns, count, path)? })
}

/// The text of a line, if it has one, or why the line cannot be used.
type JsonText = Result<Option<String>, String>;

fn json_text(object: &Object, column: &str, max: u64) -> JsonText {
    let Some(raw) = object.get(column) else {
        return Ok(None);
    };
    let text = serde_json::from_str::<Option<String>>(raw.get()).map_err(|e| format!("{column:?} is not text: {e}"))?;
    match text.as_deref().and_then(|text| too_long(text, max)) {
        Some(reason) => Err(reason),
        None => Ok(text),
    }
}

/// One column of JSONL rows: text for ids, JSON for untyped columns, Arrow values for typed ones. A value that does not fit its type
/// makes its row bad.
fn json_column(field: &Field, is_id: bool, typed: bool, objects: &[Object], texts: &mut [JsonText]) -> ArrayRef {
    if !typed {
        let mut builder = StringBuilder::new();
        for object in objects {
            let raw = object.get(field.name()).map(|r| r.get()).filter(|r| *r != "null");
            match raw {
                // An id that is a string is that string; a number is its digits.
                Some(raw) if is_id && raw.starts_with('"') => builder.append_option(serde_json::from_str::<String>(raw).ok()),
                raw => builder.append_option(raw),
            }
        }
        return Arc::new(builder.finish());
    }
    let schema = Arc::new(Schema::new(vec![field.clone()]));
    let decode = |objects: &[Object]| -> Option<ArrayRef> {
        let mut text = String::new();
        for object in objects {
            let raw = object.get(field.name()).map_or("null", |r| r.get());
            text.push_str(&format!("{{{}:{raw}}}\n", serde_json::Value::String(field.name().clone())));
        }
        let reader = ReaderBuilder::new(Arc::clone(&schema)).with_batch_size(objects.len().max(1)).build(text.as_bytes()).ok()?;
        let batch = reader.into_iter().next()?.ok()?;
        (batch.num_rows() == objects.len()).then(|| Arc::clone(batch.column(0)))
    };
    if let Some(array) = decode(objects) {
        return array;
    }
    let single: Vec<ArrayRef> = objects
        .iter()
        .zip(texts)
        .map(|(object, text)| {
            decode(std::slice::from_ref(object)).unwrap_or_else(|| {
                let raw: String = object.get(field.name()).map_or("", |r| r.get()).chars().take(60).collect();
                *text = Err(format!("{:?} is not {}: {raw}", field.name(), field.data_type()));
                arrow::array::new_null_array(field.data_type(), 1)
            })
        })
        .collect();
    let parts: Vec<&dyn arrow::array::Array> = single.iter().map(AsRef::as_ref).collect();
    arrow::compute::concat(&parts).unwrap_or_else(|_| arrow::array::new_null_array(field.data_type(), objects.len()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Write;

    use arrow::datatypes::DataType;

    use super::super::TextCell;
    use super::*;

    fn read(name: &str, bytes: &[u8], columns: &[(&str, &str)], pass: &[&str], id: Option<&str>, first: u64) -> Vec<SourceBatch> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let file = InputFile { path, relative: name.into(), format: FileFormat::of_name(name) };
        let columns: BTreeMap<String, String> = columns.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect();
        let pass: Vec<String> = pass.iter().map(|p| (*p).into()).collect();
        let settings = ColumnSettings { text: "text", id, count: None, pass_through: Some(&pass), columns: &columns };
        let limits = Limits { document: 20, line: 60 };
        let mut reader = SourceReader::open(&file, None, &settings, limits, first..u64::MAX).unwrap();
        std::iter::from_fn(|| reader.next_batch().unwrap()).collect()
    }

    #[test]
    fn odd_json_lines_are_bad_rows_by_their_number() {
        let mut text = b"\xef\xbb\xbf{\"text\":\"a\",\"y\":1}\r\n\n{\"text\":null}\n{\"y\":2}\nnot json\n".to_vec();
        text.extend_from_slice(b"{\"text\":5}\n{\"text\":\"\\ud800\"}\n{\"text\":\"\xff\"}\n");
        text.extend_from_slice(format!("{{\"text\":\"{}\"}}\n", "x".repeat(30)).as_bytes());
        text.extend_from_slice(format!("{{\"text\":\"{}\"}}\n", "x".repeat(90)).as_bytes());
        text.extend_from_slice(b"{\"text\":\"\",\"y\":\"z\"}");
        let batch = read("a.jsonl", &text, &[("y", "int64")], &["y"], None, 0).remove(0);
        assert_eq!(batch.rows, [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let kinds: Vec<&str> = batch
            .texts()
            .map(|t| match t {
                TextCell::Text(_) => "text",
                TextCell::Null => "null",
                TextCell::Bad(_) => "bad",
            })
            .collect();
        assert_eq!(kinds, ["text", "null", "null", "bad", "bad", "bad", "bad", "bad", "bad", "bad"]);
        assert_eq!(batch.columns.column(0).data_type(), &DataType::Int64);
        assert_eq!(batch.columns.column(0).null_count(), 8);
    }

    #[test]
    fn members_and_frames_are_all_read_and_rows_can_be_skipped() {
        let lines = |from: usize| (from..from + 3).map(|i| format!("{{\"text\":\"t{i}\",\"id\":{i}}}\n")).collect::<String>();
        let mut gz = Vec::new();
        let mut zst = Vec::new();
        for from in [0, 3] {
            let mut encoder = flate2::write::GzEncoder::new(&mut gz, flate2::Compression::default());
            encoder.write_all(lines(from).as_bytes()).unwrap();
            encoder.finish().unwrap();
            zst.extend(zstd::encode_all(lines(from).as_bytes(), 1).unwrap());
        }
        for (name, bytes) in [("a.jsonl.gz", gz), ("a.jsonl.zst", zst), ("a.jsonl", (lines(0) + &lines(3)).into_bytes())] {
            let batch = read(name, &bytes, &[], &[], Some("id"), 2).remove(0);
            assert_eq!(batch.rows, [2, 3, 4, 5], "{name}");
            assert_eq!(batch.text(3), TextCell::Text("t5"), "{name}");
        }
    }
}
