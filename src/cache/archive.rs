//! Caches as Parquet files: the archival form, readable without this program.
//!
//! One row per record: `text_hash` (blake3 of the text, 32 bytes), `kind` (`edges` or a readout), `namespace_hash` (hex), `namespace` (what decides the
//! values, in words, as JSON), `payload` (bytes of [`super::encode_edges`] or [`super::encode_curves`]) and `checksum`, the first 16 bytes of
//! blake3(text_hash, namespace_hash as 32 bytes, payload). The file's key-value metadata holds `right_reset.cache_export`, the version of this form.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, AsArray, BinaryBuilder, FixedSizeBinaryBuilder, RecordBatch, StringBuilder};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;

use super::sled_store::{Adopted, SledStore};
use super::{CacheError, Namespace, ScoreStore};

/// Version of the form, and the key it stands under.
const VERSION: &str = "1";
const VERSION_KEY: &str = "right_reset.cache_export";
/// Records of one write, and bytes of payloads after which one is made early.
const ROWS: usize = 4096;
const BYTES: usize = 16 << 20;

/// What became of the records of an import or a merge.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Imported {
    /// Records taken.
    pub taken: u64,
    /// Records that were there already.
    pub known: u64,
    /// Records left because their checksum or their namespace is wrong.
    pub unsound: u64,
    /// Records left because the cache is full.
    pub refused: u64,
    /// Files or folders left, and why.
    pub left: Vec<(PathBuf, String)>,
}

fn schema() -> SchemaRef {
    let fields = vec![
        Field::new("text_hash", DataType::FixedSizeBinary(32), false),
        Field::new("kind", DataType::Utf8, false),
        Field::new("namespace_hash", DataType::Utf8, false),
        Field::new("namespace", DataType::Utf8, false),
        Field::new("payload", DataType::Binary, false),
        Field::new("checksum", DataType::FixedSizeBinary(16), false),
    ];
    Arc::new(Schema::new(fields))
}

fn checksum(text: &[u8], namespace: &blake3::Hash, payload: &[u8]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(text).update(namespace.as_bytes()).update(payload);
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    out
}

fn failed(path: &Path) -> impl Fn(&dyn std::fmt::Display) -> CacheError + '_ {
    move |e| CacheError::Archive { path: path.to_owned(), reason: e.to_string() }
}

struct Rows {
    text: FixedSizeBinaryBuilder,
    kind: StringBuilder,
    hash: StringBuilder,
    words: StringBuilder,
    payload: BinaryBuilder,
    checksum: FixedSizeBinaryBuilder,
    bytes: usize,
}

impl Rows {
    fn new() -> Self {
        Self {
            text: FixedSizeBinaryBuilder::new(32),
            kind: StringBuilder::new(),
            hash: StringBuilder::new(),
            words: StringBuilder::new(),
            payload: BinaryBuilder::new(),
            checksum: FixedSizeBinaryBuilder::new(16),
            bytes: 0,
        }
    }

    fn batch(&mut self) -> Result<RecordBatch, arrow::error::ArrowError> {
        self.bytes = 0;
        let columns: Vec<arrow::array::ArrayRef> = vec![
            Arc::new(self.text.finish()),
            Arc::new(self.kind.finish()),
            Arc::new(self.hash.finish()),
            Arc::new(self.words.finish()),
            Arc::new(self.payload.finish()),
            Arc::new(self.checksum.finish()),
        ];
        RecordBatch::try_new(schema(), columns)
    }
}

/// Writes all sound records of a cache to a Parquet file, which appears when it is whole. Returns how many, and how many blocks were unsound.
///
/// # Errors
/// [`CacheError`] if the cache cannot be read or the file not be written.
pub fn export(store: &SledStore, file: &Path) -> Result<(u64, u64), CacheError> {
    let fail = failed(file);
    let mut temporary = file.as_os_str().to_owned();
    temporary.push(".rr-tmp");
    let temporary = PathBuf::from(temporary);
    let write = || {
        let out = File::create(&temporary).map_err(|e| fail(&e))?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_created_by("right-reset".into())
            .set_key_value_metadata(Some(vec![KeyValue::new(VERSION_KEY.into(), VERSION.to_owned())]))
            .set_max_row_group_row_count(Some(1 << 16))
            .build();
        let mut writer = ArrowWriter::try_new(out, schema(), Some(properties)).map_err(|e| fail(&e))?;
        let described: HashMap<_, _> = store
            .namespaces()
            .into_iter()
            .map(|(id, n)| (id, (n.kind.clone(), n.hash(), serde_json::to_string(&n).unwrap_or_default())))
            .collect();
        let mut rows = Rows::new();
        let mut records = 0_u64;
        let unsound = store.for_each_record(|text, namespace, payload| {
            let Some((kind, hash, words)) = described.get(&namespace) else { return Ok(()) };
            rows.text.append_value(text.as_bytes()).map_err(|e| fail(&e))?;
            rows.kind.append_value(kind);
            rows.hash.append_value(hash.to_hex().as_str());
            rows.words.append_value(words);
            rows.payload.append_value(payload);
            rows.checksum.append_value(checksum(text.as_bytes(), hash, payload)).map_err(|e| fail(&e))?;
            rows.bytes += payload.len();
            records += 1;
            if rows.kind.len() == ROWS || rows.bytes >= BYTES {
                writer.write(&rows.batch().map_err(|e| fail(&e))?).map_err(|e| fail(&e))?;
            }
            Ok(())
        })?;
        use arrow::array::ArrayBuilder;
        if rows.kind.len() > 0 {
            writer.write(&rows.batch().map_err(|e| fail(&e))?).map_err(|e| fail(&e))?;
        }
        let out = writer.into_inner().map_err(|e| fail(&e))?;
        out.sync_all().and_then(|()| std::fs::rename(&temporary, file)).map_err(|e| fail(&e))?;
        Ok((records, unsound))
    };
    write().inspect_err(|_| {
        // The failure is what counts, not what it left behind.
        let _ = std::fs::remove_file(&temporary);
    })
}

/// Takes the sound records of exported files; says what it left.
///
/// # Errors
/// [`CacheError`] if the cache cannot be written. A file that cannot be read is among those left.
pub fn import(store: &SledStore, files: &[PathBuf]) -> Result<Imported, CacheError> {
    let mut all = Imported::default();
    for file in files {
        if let Err(reason) = import_file(store, file, &mut all)? {
            all.left.push((file.clone(), reason));
        }
    }
    store.flush()?;
    Ok(all)
}

/// The inner error is the file's fault.
fn import_file(store: &SledStore, file: &Path, all: &mut Imported) -> Result<Result<(), String>, CacheError> {
    let builder = match File::open(file)
        .map_err(|e| e.to_string())
        .and_then(|f| ParquetRecordBatchReaderBuilder::try_new(f).map_err(|e| e.to_string()))
    {
        Ok(builder) => builder,
        Err(reason) => return Ok(Err(reason)),
    };
    let version = builder.metadata().file_metadata().key_value_metadata().and_then(|all| all.iter().find(|kv| kv.key == VERSION_KEY));
    match version.and_then(|kv| kv.value.as_deref()) {
        Some(VERSION) => {}
        Some(other) => return Ok(Err(format!("an export of version {other}; this program reads version {VERSION}"))),
        None => return Ok(Err("not an export of a score cache".into())),
    }
    let own = schema();
    let same = |(a, b): (&Arc<Field>, &Arc<Field>)| a.name() == b.name() && a.data_type() == b.data_type();
    if builder.schema().fields().len() != own.fields().len() || !builder.schema().fields().iter().zip(own.fields()).all(same) {
        return Ok(Err("its columns are not those of an export".into()));
    }
    let reader = match builder.with_batch_size(ROWS).build() {
        Ok(reader) => reader,
        Err(e) => return Ok(Err(e.to_string())),
    };
    // Namespaces by their words, and whether the hash beside them is theirs.
    let mut known: HashMap<String, Option<(Namespace, blake3::Hash)>> = HashMap::new();
    for batch in reader {
        let batch = match batch {
            Ok(batch) => batch,
            Err(e) => return Ok(Err(format!("{e}; what was read before is taken"))),
        };
        let (text, hash) = (batch.column(0).as_fixed_size_binary(), batch.column(2).as_string::<i32>());
        let (words, payload) = (batch.column(3).as_string::<i32>(), batch.column(4).as_binary::<i32>());
        let sums = batch.column(5).as_fixed_size_binary();
        for row in 0..batch.num_rows() {
            if batch.columns().iter().any(|c| c.is_null(row)) {
                all.unsound += 1;
                continue;
            }
            let namespace = known.entry(words.value(row).to_owned()).or_insert_with_key(|words| {
                let namespace: Namespace = serde_json::from_str(words).ok()?;
                let hash = namespace.hash();
                Some((namespace, hash))
            });
            let sound = namespace.as_ref().filter(|(_, own)| {
                own.to_hex().as_str() == hash.value(row) && checksum(text.value(row), own, payload.value(row))[..] == *sums.value(row)
            });
            let (Some((namespace, _)), Ok(text)) = (sound, <[u8; 32]>::try_from(text.value(row))) else {
                all.unsound += 1;
                continue;
            };
            all.count(store.adopt(&blake3::Hash::from_bytes(text), namespace, payload.value(row))?);
        }
        // Unwritten records would pile up in memory.
        store.flush()?;
    }
    Ok(Ok(()))
}

/// Takes the sound records of other caches; each is locked while it is read.
///
/// # Errors
/// [`CacheError`] if the cache cannot be written. A folder that cannot be read is among those left.
pub fn merge(store: &SledStore, folders: &[PathBuf]) -> Result<Imported, CacheError> {
    let mut all = Imported::default();
    for folder in folders {
        let other = match SledStore::open_to_read(folder) {
            Ok(Some(other)) => other,
            Ok(None) => {
                all.left.push((folder.clone(), "there is no score cache".into()));
                continue;
            }
            Err(error) => {
                all.left.push((folder.clone(), error.to_string()));
                continue;
            }
        };
        let described: HashMap<_, _> = other.namespaces().into_iter().collect();
        let mut since = 0_usize;
        let unsound = other.for_each_record(|text, namespace, payload| {
            let Some(namespace) = described.get(&namespace) else { return Ok(()) };
            all.count(store.adopt(&text, namespace, payload)?);
            since += payload.len();
            if since >= BYTES {
                since = 0;
                store.flush()?;
            }
            Ok(())
        })?;
        all.unsound += unsound;
    }
    store.flush()?;
    Ok(all)
}

impl Imported {
    fn count(&mut self, adopted: Adopted) {
        match adopted {
            Adopted::Taken => self.taken += 1,
            Adopted::Known => self.known += 1,
            Adopted::Refused => self.refused += 1,
        }
    }
}
