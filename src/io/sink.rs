//! Sinks: Parquet, Arrow IPC and JSONL. Bytes depend on the rows alone.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;
use arrow::ipc::CompressionType;
use arrow::ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use arrow::json::WriterBuilder;
use arrow::json::writer::{LineDelimited, Writer};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression as ParquetCompression, Encoding, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};

use super::{IoError, at};
use crate::pipeline::spec::{Compression, OutputFormat};

/// Rows of one write: page boundaries follow the size of each write, so it must be fixed.
const WRITE_ROWS: usize = 1024;
/// Bytes of text after which a write is made early.
const WRITE_BYTES: usize = 8 << 20;
/// Bytes that a row group may hold in memory.
const ROW_GROUP_BYTES: usize = 64 << 20;

/// Where a writer writes.
pub enum SinkTarget {
    /// A file.
    File(PathBuf),
    /// Standard output.
    Stdout,
}

enum Inner {
    Parquet(Box<ArrowWriter<Out>>),
    ArrowFile(FileWriter<Out>),
    ArrowStream(StreamWriter<Out>),
    Jsonl(Writer<Out, LineDelimited>),
}

enum Out {
    File(BufWriter<File>),
    Stdout(BufWriter<std::io::Stdout>),
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::File(out) => out.write(bytes),
            Self::Stdout(out) => out.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self {
            Self::File(out) => out.flush(),
            Self::Stdout(out) => out.flush(),
        }
    }
}

/// What a format's writer says.
enum WriteError {
    Io(std::io::Error),
    Other(String),
}

impl From<parquet::errors::ParquetError> for WriteError {
    fn from(error: parquet::errors::ParquetError) -> Self {
        match error {
            parquet::errors::ParquetError::External(inner) => match inner.downcast::<std::io::Error>() {
                Ok(io) => Self::Io(*io),
                Err(other) => Self::Other(other.to_string()),
            },
            other => Self::Other(other.to_string()),
        }
    }
}

impl From<arrow::error::ArrowError> for WriteError {
    fn from(error: arrow::error::ArrowError) -> Self {
        match error {
            arrow::error::ArrowError::IoError(_, io) => Self::Io(io),
            other => Self::Other(other.to_string()),
        }
    }
}

fn failed(path: &Path, error: impl Into<WriteError>) -> IoError {
    match error.into() {
        WriteError::Io(io) => at(path)(io),
        WriteError::Other(reason) => IoError::Format { path: path.to_owned(), format: "output", reason },
    }
}

/// Writes record batches of one schema, gathered into writes of a fixed number of rows.
pub struct ChunkWriter {
    path: PathBuf,
    schema: SchemaRef,
    inner: Inner,
    waiting: Vec<RecordBatch>,
    waiting_rows: usize,
    waiting_bytes: usize,
    rows: u64,
}

impl ChunkWriter {
    /// Opens a writer.
    ///
    /// # Errors
    /// [`IoError`] if the file cannot be made.
    pub fn create(target: SinkTarget, schema: &SchemaRef, format: OutputFormat, compression: Compression) -> Result<Self, IoError> {
        let (path, out, stream) = match target {
            SinkTarget::File(path) => {
                let file = File::create(&path).map_err(at(&path))?;
                (path, Out::File(BufWriter::with_capacity(1 << 18, file)), false)
            }
            SinkTarget::Stdout => (PathBuf::from("-"), Out::Stdout(BufWriter::new(std::io::stdout())), true),
        };
        let ipc = || {
            let kind = (compression == Compression::Zstd).then_some(CompressionType::ZSTD);
            IpcWriteOptions::default().try_with_compression(kind).map_err(|e| failed(&path, e))
        };
        let inner = match format {
            OutputFormat::Jsonl => Inner::Jsonl(WriterBuilder::new().with_explicit_nulls(true).build(out)),
            _ if stream => Inner::ArrowStream(StreamWriter::try_new_with_options(out, schema, ipc()?).map_err(|e| failed(&path, e))?),
            OutputFormat::Arrow => Inner::ArrowFile(FileWriter::try_new_with_options(out, schema, ipc()?).map_err(|e| failed(&path, e))?),
            OutputFormat::Parquet => {
                let codec = match compression {
                    Compression::Zstd => ParquetCompression::ZSTD(ZstdLevel::default()),
                    Compression::Snappy => ParquetCompression::SNAPPY,
                    Compression::None => ParquetCompression::UNCOMPRESSED,
                };
                let mut words: Vec<KeyValue> = schema.metadata().iter().map(|(k, v)| KeyValue::new(k.clone(), v.clone())).collect();
                words.sort_by(|a, b| a.key.cmp(&b.key));
                let mut properties = WriterProperties::builder();
                // Values that hardly repeat are not worth a dictionary, nor are bounds of text worth their bytes.
                for name in [
                    "chunk_id",
                    "text",
                    "byte_start",
                    "byte_end",
                    "char_start",
                    "char_end",
                    "cut_score",
                    "cut_damage",
                    "cut_damage_per_token",
                ] {
                    properties = properties.set_column_dictionary_enabled(name.into(), false);
                }
                for name in ["byte_start", "byte_end", "char_start", "char_end"] {
                    properties = properties.set_column_encoding(name.into(), Encoding::DELTA_BINARY_PACKED);
                }
                for name in ["chunk_id", "text"] {
                    properties = properties.set_column_statistics_enabled(name.into(), EnabledStatistics::None);
                }
                let properties = properties
                    .set_key_value_metadata(Some(words))
                    .set_compression(codec)
                    .set_created_by("right-reset".into())
                    .set_max_row_group_row_count(Some(1 << 20))
                    .build();
                Inner::Parquet(Box::new(ArrowWriter::try_new(out, Arc::clone(schema), Some(properties)).map_err(|e| failed(&path, e))?))
            }
        };
        let schema = Arc::clone(schema);
        Ok(Self { path, schema, inner, waiting: Vec::new(), waiting_rows: 0, waiting_bytes: 0, rows: 0 })
    }

    /// Rows given so far.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Takes one batch; `bytes` is the size of its text.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses.
    pub fn write(&mut self, batch: RecordBatch, bytes: usize) -> Result<(), IoError> {
        let mut batch = batch;
        self.rows += batch.num_rows() as u64;
        let average = bytes / batch.num_rows().max(1);
        while batch.num_rows() > 0 {
            let take = batch.num_rows().min(WRITE_ROWS - self.waiting_rows);
            self.waiting.push(batch.slice(0, take));
            self.waiting_rows += take;
            self.waiting_bytes += average * take;
            batch = batch.slice(take, batch.num_rows() - take);
            if self.waiting_rows == WRITE_ROWS || self.waiting_bytes >= WRITE_BYTES {
                self.write_waiting()?;
            }
        }
        Ok(())
    }

    fn fail(&self, e: impl Into<WriteError>) -> IoError {
        failed(&self.path, e)
    }

    fn write_waiting(&mut self) -> Result<(), IoError> {
        if self.waiting_rows == 0 {
            return Ok(());
        }
        let batch = match &self.waiting[..] {
            [whole] => whole.clone(),
            pieces => concat_batches(&self.schema, pieces).map_err(|e| self.fail(e))?,
        };
        self.waiting.clear();
        (self.waiting_rows, self.waiting_bytes) = (0, 0);
        let written = match &mut self.inner {
            Inner::Parquet(writer) => {
                let result = writer.write(&batch);
                if result.is_ok() && writer.in_progress_size() >= ROW_GROUP_BYTES { writer.flush() } else { result }
                    .map_err(WriteError::from)
            }
            Inner::ArrowFile(writer) => writer.write(&batch).map_err(WriteError::from),
            Inner::ArrowStream(writer) => writer.write(&batch).map_err(WriteError::from),
            Inner::Jsonl(writer) => writer.write(&batch).map_err(WriteError::from),
        };
        written.map_err(|e| self.fail(e))
    }

    /// Writes what is left and the end of the format; a file is synced.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses.
    pub fn finish(mut self) -> Result<(), IoError> {
        self.write_waiting()?;
        let path = self.path.clone();
        let out = match self.inner {
            Inner::Parquet(writer) => writer.into_inner().map_err(|e| failed(&path, e))?,
            Inner::ArrowFile(mut writer) => {
                writer.finish().map_err(|e| failed(&path, e))?;
                writer.into_inner().map_err(|e| failed(&path, e))?
            }
            Inner::ArrowStream(mut writer) => {
                writer.finish().map_err(|e| failed(&path, e))?;
                writer.into_inner().map_err(|e| failed(&path, e))?
            }
            Inner::Jsonl(mut writer) => {
                writer.finish().map_err(|e| failed(&path, e))?;
                writer.into_inner()
            }
        };
        kill_point!("before-file-sync");
        match out {
            Out::File(out) => out.into_inner().map_err(|e| at(&path)(e.into_error()))?.sync_all().map_err(at(&path)),
            Out::Stdout(mut out) => out.flush().map_err(at(Path::new("standard output"))),
        }
    }
}
