//! The store on disk: several sled databases by the first byte of the text hash, a lock, and the rescue of damaged databases.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::codec::{BLOCK_PAYLOAD, Block, KEY, MAGIC, key};
use super::{CacheError, Namespace, NamespaceId, ScoreStore};

/// Folder of the current format; another format gets another folder.
const VERSION_DIR: &str = "v1";
const SHARDS: usize = 4;
/// sled's page cache per database. Its real use of memory can be several times as much.
const SHARD_CACHE_BYTES: u64 = 16 << 20;
/// Keys of namespace descriptions begin with this instead of a text hash.
const NAMESPACE_KEY: [u8; 32] = *b"namespace description ..........";

/// Keys of what is remembered of a namespace's use.
const USE_KEY: [u8; 32] = *b"namespace use ..................";
/// Uses nearer to each other than this are not written down.
const USE_EVERY: u64 = 3600;

/// Who uses a namespace, and when it was last used, in seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// Names of the models it was used with.
    pub models: BTreeSet<String>,
    /// The last use.
    pub last: u64,
}

/// What became of a record of another cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adopted {
    /// It was written.
    Taken,
    /// It was there.
    Known,
    /// The store takes no more.
    Refused,
}

/// Namespaces to remove: those for which all that is given holds.
#[derive(Debug, Clone, Default)]
pub struct Prune {
    /// Name of a model it was used with, or the beginning of the hash of its weights or tokenizer.
    pub model: Option<String>,
    /// Its kind: a readout, or `edges`.
    pub kind: Option<String>,
    /// Not used for so long.
    pub unused_for: Option<Duration>,
}

impl Prune {
    fn takes(&self, namespace: &Namespace, used: Option<&Use>, now: u64) -> bool {
        let model = |name: &String| {
            let hashes = ["weights", "tokenizer", "encoder_weights"].map(|f| namespace.fields.get(f));
            used.is_some_and(|u| u.models.contains(name))
                || (name.len() >= 8 && hashes.into_iter().flatten().any(|h| h.starts_with(name.as_str())))
        };
        let unused = |time: &Duration| used.is_none_or(|u| u.last + time.as_secs() <= now);
        self.model.as_ref().is_none_or(model)
            && self.kind.as_ref().is_none_or(|k| *k == namespace.kind)
            && self.unused_for.as_ref().is_none_or(unused)
    }
}

fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Counts of one namespace.
#[derive(Debug, Clone, Serialize)]
pub struct NamespaceStats {
    /// Its number in this store.
    pub id: u32,
    /// What its records are.
    pub namespace: Namespace,
    /// Who uses it.
    pub used: Option<Use>,
    /// Sound records.
    pub records: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
}

/// Counts of a store.
#[derive(Debug, Clone, Serialize)]
pub struct StoreStats {
    /// Its folder.
    pub path: PathBuf,
    /// Bytes on disk.
    pub disk_bytes: u64,
    /// By namespace.
    pub namespaces: Vec<NamespaceStats>,
    /// Blocks that failed their checksum.
    pub unsound_blocks: u64,
}

/// The blocks of a record read so far.
#[derive(Clone)]
struct Gathered {
    payload: Vec<u8>,
    /// The block that must come next, and how many there are.
    next: u16,
    blocks: u16,
    /// Payload bytes of the whole record.
    bytes: u32,
}

/// The sled store.
pub struct SledStore {
    path: PathBuf,
    shards: Vec<sled::Db>,
    namespaces: Mutex<BTreeMap<u32, Namespace>>,
    uses: Mutex<BTreeMap<u32, Use>>,
    /// Nothing is written.
    read_only: bool,
    max_bytes: Option<u64>,
    full: AtomicBool,
    unsound: AtomicU64,
    unwritten: AtomicU64,
    /// Held while the store is open.
    _lock: File,
}

impl SledStore {
    /// Opens the store in folder `path`, made if absent. `max_bytes` bounds its size on disk: beyond it nothing more is written.
    ///
    /// A database that cannot be opened for corruption is moved aside and its sound records are kept.
    ///
    /// # Errors
    /// [`CacheError::Locked`] if another process has it, [`CacheError::Io`] if the disk refuses.
    pub fn open(path: &Path, max_bytes: Option<u64>) -> Result<Self, CacheError> {
        Self::open_as(path, max_bytes, false)
    }

    /// Opens the store to read it alone; `None` if there is none.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_to_read(path: &Path) -> Result<Option<Self>, CacheError> {
        path.join(VERSION_DIR).is_dir().then(|| Self::open_as(path, None, true)).transpose()
    }

    fn open_as(path: &Path, max_bytes: Option<u64>, read_only: bool) -> Result<Self, CacheError> {
        let dir = path.join(VERSION_DIR);
        fs::create_dir_all(&dir).map_err(io(path))?;
        let lock = take_lock(path, &dir.join("lock"))?;
        finish_rewrite(path, &dir)?;
        let mut shards = Vec::new();
        for shard in 0..SHARDS {
            shards.push(open_shard(path, &dir.join(format!("shard-{shard}")))?);
        }
        let mut namespaces = BTreeMap::new();
        for item in shards[0].scan_prefix(NAMESPACE_KEY) {
            let (_, value) = item.map_err(|e| damage(path, &e))?;
            if let Some((block, _)) = Block::open(&value)
                && let Ok(namespace) = serde_json::from_slice::<Namespace>(block.payload)
            {
                namespaces.insert(namespace_of(&block.key), namespace);
            }
        }
        let mut uses = BTreeMap::new();
        for item in shards[0].scan_prefix(USE_KEY) {
            let (key, value) = item.map_err(|e| damage(path, &e))?;
            if let (Ok(key), Ok(used)) = (<[u8; KEY]>::try_from(&key[..]), serde_json::from_slice::<Use>(&value)) {
                uses.insert(namespace_of(&key), used);
            }
        }
        let store = Self {
            path: path.to_owned(),
            shards,
            namespaces: Mutex::new(namespaces),
            uses: Mutex::new(uses),
            read_only,
            max_bytes,
            full: AtomicBool::new(false),
            unsound: AtomicU64::new(0),
            unwritten: AtomicU64::new(0),
            _lock: lock,
        };
        store.check_size()?;
        Ok(store)
    }

    fn shard(&self, text: &[u8; 32]) -> &sled::Db {
        &self.shards[usize::from(text[0]) * SHARDS / 256]
    }

    /// Marks the store so that the next opening rescues it, and reports.
    fn failed(&self, error: &sled::Error) -> CacheError {
        if matches!(error, sled::Error::Corruption { .. }) {
            // The mark is a help for the next run; without it sled finds the damage itself.
            let _ = File::create(self.path.join(VERSION_DIR).join("suspect"));
        }
        damage(&self.path, error)
    }

    /// Bytes on disk.
    ///
    /// # Errors
    /// [`CacheError::Io`] if sled cannot tell.
    pub fn disk_bytes(&self) -> Result<u64, CacheError> {
        let sizes = self.shards.iter().map(sled::Db::size_on_disk);
        sizes.sum::<Result<u64, _>>().map_err(|e| self.failed(&e))
    }

    fn check_size(&self) -> Result<(), CacheError> {
        if let Some(max) = self.max_bytes {
            let size = self.disk_bytes()?;
            if size >= max && !self.full.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    event = "cache_full",
                    size,
                    max,
                    "the score cache has reached cache.max_bytes: nothing more is written to it"
                );
            }
        }
        Ok(())
    }

    /// Reads everything and counts it.
    ///
    /// # Errors
    /// [`CacheError`] if the store cannot be read.
    pub fn stats(&self) -> Result<StoreStats, CacheError> {
        let known = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut by_id: BTreeMap<u32, NamespaceStats> = known
            .into_iter()
            .map(|(id, namespace)| {
                (id, NamespaceStats { id, namespace, used: self.uses().get(&id).cloned(), records: 0, payload_bytes: 0 })
            })
            .collect();
        let mut unsound = 0;
        for item in self.shards.iter().flat_map(|db| db.iter()) {
            let (stored, value) = item.map_err(|e| self.failed(&e))?;
            if stored == SENTINEL || stored.starts_with(&USE_KEY) {
                continue;
            }
            match Block::open(&value) {
                Some((block, length)) if block.key[..] == stored[..] && length == value.len() => {
                    let first = block.key[36..] == [0, 0];
                    if let Some(stats) = by_id.get_mut(&namespace_of(&block.key)).filter(|_| !stored.starts_with(&NAMESPACE_KEY)) {
                        stats.records += u64::from(first);
                        stats.payload_bytes += block.payload.len() as u64;
                    }
                }
                _ => unsound += 1,
            }
        }
        Ok(StoreStats {
            path: self.path.clone(),
            disk_bytes: self.disk_bytes()?,
            namespaces: by_id.into_values().collect(),
            unsound_blocks: unsound,
        })
    }

    fn uses(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Use>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `take` with every sound record, by text and namespace. Returns how many records were unsound.
    ///
    /// # Errors
    /// [`CacheError`] if the store cannot be read, or of `take`.
    pub fn for_each_record(
        &self,
        mut take: impl FnMut(blake3::Hash, NamespaceId, &[u8]) -> Result<(), CacheError>,
    ) -> Result<u64, CacheError> {
        let tags: BTreeMap<u32, [u8; 8]> =
            self.namespaces.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|(&id, n)| (id, tag(n))).collect();
        let mut unsound = 0;
        let mut current: Option<([u8; 36], Gathered)> = None;
        let mut finish = |current: Option<([u8; 36], Gathered)>, unsound: &mut u64| {
            let Some((head, record)) = current else { return Ok(()) };
            if record.next != record.blocks || record.payload.len() != record.bytes as usize {
                *unsound += 1;
                return Ok(());
            }
            let (text, id) = head.split_at(32);
            let mut hash = [0; 32];
            hash.copy_from_slice(text);
            take(blake3::Hash::from_bytes(hash), NamespaceId(u32::from_be_bytes([id[0], id[1], id[2], id[3]])), &record.payload)
        };
        for item in self.shards.iter().flat_map(|db| db.iter()) {
            let (stored, value) = item.map_err(|e| self.failed(&e))?;
            if stored == SENTINEL || stored.starts_with(&USE_KEY) || stored.starts_with(&NAMESPACE_KEY) {
                continue;
            }
            let sound = Block::open(&value).filter(|(b, length)| b.key[..] == stored[..] && *length == value.len());
            let Some((block, _)) = sound.filter(|(b, _)| tags.get(&namespace_of(&b.key)) == Some(&b.namespace)) else {
                unsound += u64::from(stored.ends_with(&[0, 0]));
                continue;
            };
            let mut head = [0; 36];
            head.copy_from_slice(&block.key[..36]);
            if current.as_ref().is_none_or(|c| c.0 != head) {
                finish(current.take(), &mut unsound)?;
                current = Some((head, Gathered { payload: Vec::new(), next: 0, blocks: block.blocks, bytes: block.bytes }));
            }
            let number = u16::from_be_bytes([block.key[36], block.key[37]]);
            if let Some((_, record)) = current.as_mut().filter(|c| c.1.next == number) {
                record.payload.extend_from_slice(block.payload);
                record.next += 1;
            }
        }
        finish(current, &mut unsound)?;
        Ok(unsound)
    }

    /// Takes a record of another cache, unless it is there.
    ///
    /// # Errors
    /// [`CacheError`] if the store cannot be written.
    pub fn adopt(&self, text: &blake3::Hash, namespace: &Namespace, payload: &[u8]) -> Result<Adopted, CacheError> {
        let id = self.namespace(namespace)?;
        if self.lookup(text, &[id])?[0].is_some() {
            return Ok(Adopted::Known);
        }
        let before = self.unwritten.load(Ordering::Relaxed);
        self.insert(text, id, payload)?;
        Ok(if self.unwritten.load(Ordering::Relaxed) > before { Adopted::Refused } else { Adopted::Taken })
    }

    /// The namespaces that would be removed.
    #[must_use]
    pub fn to_prune(&self, prune: &Prune) -> Vec<NamespaceId> {
        let uses = self.uses();
        self.namespaces().into_iter().filter(|(id, n)| prune.takes(n, uses.get(&id.0), now())).map(|(id, _)| id).collect()
    }

    /// Writes the store anew without some namespaces, without what is unsound, and without what databases set aside left on disk; this gives their
    /// space back. Needs room for the new databases beside the old ones, one after another. Killed at any instant, the store is as it was or as it will be,
    /// database by database. Returns the bytes on disk before and after.
    ///
    /// # Errors
    /// [`CacheError`] if the disk refuses; nothing is lost.
    pub fn rewrite(self, without: &[NamespaceId]) -> Result<(u64, u64), CacheError> {
        let path = self.path.clone();
        let dir = path.join(VERSION_DIR);
        let before = folder_bytes(&dir);
        let Self { shards, _lock, .. } = self;
        for (i, old) in shards.into_iter().enumerate() {
            let (place, fresh, aside) = (dir.join(format!("shard-{i}")), dir.join(format!("compact-{i}")), dir.join(format!("old-{i}")));
            let Attempt::Open(new) = attempt(&fresh) else {
                return Err(CacheError::Io { path, reason: format!("cannot make {}", fresh.display()) });
            };
            let mut since = 0;
            for item in old.iter() {
                let (key, value) = item.map_err(|e| damage(&path, &e))?;
                let own = <[u8; KEY]>::try_from(&key[..]).ok();
                if own.is_some_and(|k| without.contains(&NamespaceId(namespace_of(&k)))) {
                    continue;
                }
                let description = key == SENTINEL || key.starts_with(&USE_KEY);
                if description || Block::open(&value).is_some_and(|(b, length)| b.key[..] == key[..] && length == value.len()) {
                    since += value.len();
                    new.insert(&key[..], value).map_err(|e| damage(&path, &e))?;
                    if since > 64 << 20 {
                        since = 0;
                        new.flush().map_err(|e| damage(&path, &e))?;
                    }
                }
            }
            new.flush().map_err(|e| damage(&path, &e))?;
            drop((old, new));
            kill_point!("before-cache-swap");
            fs::rename(&place, &aside).map_err(io(&path))?;
            kill_point!("between-cache-swap");
            fs::rename(&fresh, &place).map_err(io(&path))?;
            kill_point!("after-cache-swap");
            fs::copy(place.join("conf"), place.with_extension("conf")).map_err(io(&path))?;
            finish_rewrite(&path, &dir)?;
        }
        for entry in fs::read_dir(&dir).map_err(io(&path))? {
            let entry = entry.map_err(io(&path))?.path();
            if entry.extension().is_some_and(|e| e.to_string_lossy().starts_with("damaged-")) {
                fs::remove_dir_all(&entry).map_err(io(&path))?;
            }
        }
        Ok((before, folder_bytes(&dir)))
    }
}

/// Brings a rewrite that was cut short to an end.
fn finish_rewrite(path: &Path, dir: &Path) -> Result<(), CacheError> {
    for i in 0..SHARDS {
        let (place, aside, fresh) = (dir.join(format!("shard-{i}")), dir.join(format!("old-{i}")), dir.join(format!("compact-{i}")));
        if aside.exists() && !place.exists() {
            fs::rename(&aside, &place).map_err(io(path))?;
        }
        for left in [aside, fresh.clone()].into_iter().filter(|p| p.exists()) {
            fs::remove_dir_all(left).map_err(io(path))?;
        }
        let copy = fresh.with_extension("conf");
        if copy.exists() {
            fs::remove_file(copy).map_err(io(path))?;
        }
    }
    Ok(())
}

fn folder_bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    entries.map(|e| if e.path().is_dir() { folder_bytes(&e.path()) } else { e.metadata().map_or(0, |m| m.len()) }).sum()
}

impl ScoreStore for SledStore {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, CacheError> {
        let mut known = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((&id, _)) = known.iter().find(|(_, n)| *n == namespace) {
            return Ok(NamespaceId(id));
        }
        if self.read_only {
            // No record has this number.
            return Ok(NamespaceId(u32::MAX));
        }
        let id = known.last_key_value().map_or(1, |(&last, _)| last + 1);
        let payload = serde_json::to_vec(namespace).unwrap_or_default();
        let key = key(&NAMESPACE_KEY, id, 0);
        let block = Block { key, namespace: tag(namespace), blocks: 1, bytes: payload.len() as u32, payload: &payload };
        self.shards[0].insert(key, block.seal()).map_err(|e| self.failed(&e))?;
        self.shards[0].flush().map_err(|e| self.failed(&e))?;
        known.insert(id, namespace.clone());
        Ok(NamespaceId(id))
    }

    fn used(&self, id: NamespaceId, model: &str) -> Result<(), CacheError> {
        if self.read_only {
            return Ok(());
        }
        let mut uses = self.uses();
        let used = uses.entry(id.0).or_default();
        if !used.models.insert(model.to_owned()) && used.last + USE_EVERY > now() {
            return Ok(());
        }
        used.last = now();
        let payload = serde_json::to_vec(used).unwrap_or_default();
        self.shards[0].insert(key(&USE_KEY, id.0, 0), payload).map(drop).map_err(|e| self.failed(&e))
    }

    fn namespaces(&self) -> Vec<(NamespaceId, Namespace)> {
        let known = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().map(|(&id, n)| (NamespaceId(id), n.clone())).collect()
    }

    fn lookup(&self, text: &blake3::Hash, wanted: &[NamespaceId]) -> Result<Vec<Option<Vec<u8>>>, CacheError> {
        let tags: Vec<Option<[u8; 8]>> = {
            let known = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
            wanted.iter().map(|id| known.get(&id.0).map(tag)).collect()
        };
        let mut found: Vec<Option<Gathered>> = vec![None; wanted.len()];
        let mut broken = vec![false; wanted.len()];
        for item in self.shard(text.as_bytes()).scan_prefix(text.as_bytes()) {
            let (stored, value) = item.map_err(|e| self.failed(&e))?;
            let Ok(stored) = <[u8; KEY]>::try_from(&stored[..]) else {
                continue;
            };
            let Some(i) = wanted.iter().position(|id| id.0 == namespace_of(&stored)) else {
                continue;
            };
            let number = u16::from_be_bytes([stored[36], stored[37]]);
            let opened = Block::open(&value).filter(|(b, length)| b.key == stored && *length == value.len());
            let Some((block, _)) = opened.filter(|(b, _)| Some(b.namespace) == tags[i]) else {
                broken[i] = true;
                continue;
            };
            let so_far =
                found[i].get_or_insert_with(|| Gathered { payload: Vec::new(), next: 0, blocks: block.blocks, bytes: block.bytes });
            if number == so_far.next {
                so_far.payload.extend_from_slice(block.payload);
                so_far.next += 1;
            }
        }
        let mut out = Vec::with_capacity(wanted.len());
        for (found, broken) in found.into_iter().zip(broken) {
            let there = found.is_some();
            let whole = found.filter(|f| !broken && f.next == f.blocks && f.payload.len() == f.bytes as usize).map(|f| f.payload);
            if whole.is_none() && (there || broken) {
                self.unsound.fetch_add(1, Ordering::Relaxed);
            }
            out.push(whole);
        }
        Ok(out)
    }

    fn insert(&self, text: &blake3::Hash, namespace: NamespaceId, payload: &[u8]) -> Result<(), CacheError> {
        if self.read_only {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let known = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner).get(&namespace.0).map(tag);
        let count = payload.len().div_ceil(BLOCK_PAYLOAD).max(1);
        let (Some(tag), Ok(blocks), Ok(bytes)) = (known, u16::try_from(count), u32::try_from(payload.len())) else {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        if self.full.load(Ordering::Relaxed) {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let mut batch = sled::Batch::default();
        for number in 0..blocks {
            let start = usize::from(number) * BLOCK_PAYLOAD;
            let payload = &payload[start..payload.len().min(start + BLOCK_PAYLOAD)];
            let key = key(text.as_bytes(), namespace.0, number);
            batch.insert(&key[..], Block { key, namespace: tag, blocks, bytes, payload }.seal());
        }
        self.shard(text.as_bytes()).apply_batch(batch).map_err(|e| self.failed(&e))
    }

    fn flush(&self) -> Result<(), CacheError> {
        if self.read_only {
            return Ok(());
        }
        for shard in &self.shards {
            shard.flush().map_err(|e| self.failed(&e))?;
        }
        self.check_size()
    }

    fn trouble(&self) -> (u64, u64) {
        (self.unsound.load(Ordering::Relaxed), self.unwritten.load(Ordering::Relaxed))
    }
}

fn tag(namespace: &Namespace) -> [u8; 8] {
    let mut tag = [0; 8];
    tag.copy_from_slice(&namespace.hash().as_bytes()[..8]);
    tag
}

fn namespace_of(key: &[u8; KEY]) -> u32 {
    u32::from_be_bytes([key[32], key[33], key[34], key[35]])
}

fn io(path: &Path) -> impl Fn(std::io::Error) -> CacheError + '_ {
    move |e| CacheError::Io { path: path.to_owned(), reason: e.to_string() }
}

fn damage(path: &Path, error: &sled::Error) -> CacheError {
    match error {
        sled::Error::Corruption { .. } => CacheError::Damaged { path: path.to_owned(), reason: error.to_string() },
        other => CacheError::Io { path: path.to_owned(), reason: other.to_string() },
    }
}

/// Takes the lock and writes down who holds it.
fn take_lock(path: &Path, file: &Path) -> Result<File, CacheError> {
    let mut lock = File::options().read(true).write(true).create(true).truncate(false).open(file).map_err(io(path))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut holder = String::new();
        // An unreadable note only makes the sentence vaguer.
        let _ = lock.read_to_string(&mut holder);
        let holder = if holder.trim().is_empty() { "another process".to_owned() } else { holder.trim().to_owned() };
        return Err(CacheError::Locked { path: path.to_owned(), holder });
    }
    let command: Vec<String> = std::env::args().take(3).collect();
    lock.set_len(0).and_then(|()| lock.rewind()).map_err(io(path))?;
    writeln!(lock, "process {} ({})", std::process::id(), command.join(" ")).map_err(io(path))?;
    Ok(lock)
}

/// A key that every database holds: one that opens without it has lost its contents.
const SENTINEL: &[u8] = b"sentinel";

/// sled's own configuration file never changes, but sled takes a damaged one for that of a new database: a copy of it is kept, and a
/// difference is found before sled gets to write to the log.
fn conf_differs(dir: &Path) -> bool {
    match (fs::read(dir.join("conf")), fs::read(dir.with_extension("conf"))) {
        (Ok(conf), Ok(copy)) => conf != copy,
        (Err(_), Ok(_)) => true,
        (_, Err(_)) => false,
    }
}

/// What came of an attempt to open a database.
enum Attempt {
    Open(sled::Db),
    Damaged(String),
    Failed(std::io::Error),
}

fn attempt(dir: &Path) -> Attempt {
    let open = || {
        let db = sled::Config::new().path(dir).cache_capacity(SHARD_CACHE_BYTES).flush_every_ms(None).open()?;
        let copy = dir.with_extension("conf");
        if db.get(SENTINEL)?.is_none() {
            if copy.exists() {
                return Err(sled::Error::ReportableBug("it has lost its contents".into()));
            }
            db.insert(SENTINEL, &[])?;
            db.flush()?;
        }
        if !copy.exists() {
            fs::copy(dir.join("conf"), copy)?;
        }
        Ok(db)
    };
    match std::panic::catch_unwind(AssertUnwindSafe(open)) {
        Ok(Ok(db)) => Attempt::Open(db),
        Ok(Err(sled::Error::Io(e))) if e.kind() != std::io::ErrorKind::InvalidData && e.kind() != std::io::ErrorKind::UnexpectedEof => {
            Attempt::Failed(e)
        }
        Ok(Err(e)) => Attempt::Damaged(e.to_string()),
        Err(_) => Attempt::Damaged("sled panicked on opening it".into()),
    }
}

/// Opens one database; a damaged one is tried again without half-written snapshots, then set aside and salvaged.
fn open_shard(path: &Path, dir: &Path) -> Result<sled::Db, CacheError> {
    let suspect = path.join(VERSION_DIR).join("suspect");
    let mut reason = String::from("a run found it damaged");
    if conf_differs(dir) {
        reason = "its configuration file is damaged".into();
    } else if !suspect.exists() {
        for retry in [false, true] {
            if retry {
                let snapshots = fs::read_dir(dir).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
                for file in snapshots.filter(|p| p.extension().is_some_and(|e| e == "generating")) {
                    fs::remove_file(file).map_err(io(path))?;
                }
            }
            match attempt(dir) {
                Attempt::Open(db) => return Ok(db),
                // Our own lock is held, so this is the attempt before: what its panic left behind has not let go of the file yet.
                Attempt::Failed(e) if retry && e.to_string().contains("could not acquire lock") => {}
                Attempt::Failed(e) => return Err(io(path)(e)),
                Attempt::Damaged(why) => reason = why,
            }
        }
    }
    let aside = (0..).map(|i| dir.with_extension(format!("damaged-{i}"))).find(|p| !p.exists()).unwrap_or_else(|| dir.to_owned());
    if dir.exists() {
        fs::rename(dir, &aside).map_err(io(path))?;
    }
    let copy = dir.with_extension("conf");
    if copy.exists() {
        fs::remove_file(&copy).map_err(io(path))?;
    }
    let db = match attempt(dir) {
        Attempt::Open(db) => db,
        Attempt::Failed(e) => return Err(io(path)(e)),
        Attempt::Damaged(reason) => {
            return Err(CacheError::Damaged { path: path.to_owned(), reason });
        }
    };
    let kept = salvage(path, &aside, &db)?;
    db.flush().map_err(|e| damage(path, &e))?;
    tracing::warn!(event = "cache_rescued", %reason, kept, aside = %aside.display(), "part of the score cache was damaged; it was set aside and its sound records kept");
    if suspect.exists() && dir.ends_with(format!("shard-{}", SHARDS - 1)) {
        fs::remove_file(&suspect).map_err(io(path))?;
    }
    Ok(db)
}

/// Copies every sound block found anywhere in the files of a damaged database.
fn salvage(path: &Path, aside: &Path, db: &sled::Db) -> Result<u64, CacheError> {
    const CHUNK: usize = 8 << 20;
    const OVERLAP: usize = 8 << 10;
    let mut kept: HashMap<[u8; KEY], ()> = HashMap::new();
    let mut files: Vec<PathBuf> = Vec::new();
    let mut folders = vec![aside.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().filter_map(Result::ok) {
            let path = entry.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    for file in files {
        let mut reader = File::open(&file).map_err(io(path))?;
        let mut window: Vec<u8> = Vec::new();
        loop {
            let read = (&mut reader).take(CHUNK as u64).read_to_end(&mut window).map_err(io(path))?;
            let last = read == 0;
            let mut at = 0;
            let end = if last { window.len() } else { window.len().saturating_sub(OVERLAP) };
            while at < end {
                let Some(found) = window[at..].iter().position(|&b| b == MAGIC[0]) else {
                    break;
                };
                at += found;
                match Block::open(&window[at..]) {
                    Some((block, length)) => {
                        if kept.insert(block.key, ()).is_none() {
                            db.insert(block.key, &window[at..at + length]).map_err(|e| damage(path, &e))?;
                        }
                        at += length;
                    }
                    None => at += 1,
                }
            }
            if last {
                break;
            }
            window.drain(..end.max(at).min(window.len()));
        }
    }
    Ok(kept.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(readout: &str) -> Namespace {
        Namespace::new("scores", [("readout", readout.to_owned())])
    }

    fn fill(store: &SledStore) -> Vec<(blake3::Hash, Vec<u8>)> {
        let id = store.namespace(&namespace("rr")).unwrap();
        let records: Vec<_> = (0..200_u32)
            .map(|i| {
                let payload: Vec<u8> = (0..(i as usize * 97)).map(|j| (j as u32 * i) as u8).collect();
                (blake3::hash(&i.to_le_bytes()), payload)
            })
            .collect();
        for (text, payload) in &records {
            store.insert(text, id, payload).unwrap();
        }
        store.flush().unwrap();
        records
    }

    #[test]
    fn records_of_any_size_come_back_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let records = fill(&SledStore::open(dir.path(), None).unwrap());
        let store = SledStore::open(dir.path(), None).unwrap();
        let (rr, lr) = (store.namespace(&namespace("rr")).unwrap(), store.namespace(&namespace("lr")).unwrap());
        for (text, payload) in &records {
            assert_eq!(store.lookup(text, &[lr, rr]).unwrap(), [None, Some(payload.clone())]);
        }
        let stats = store.stats().unwrap();
        assert_eq!((stats.namespaces[0].records, stats.unsound_blocks), (200, 0));
    }

    #[test]
    fn a_second_opening_says_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let _first = SledStore::open(dir.path(), None).unwrap();
        let Err(CacheError::Locked { holder, .. }) = SledStore::open(dir.path(), None) else { panic!("expected a lock") };
        assert!(holder.contains(&std::process::id().to_string()), "{holder}");
    }

    #[test]
    fn an_unsound_record_is_a_counted_miss() {
        let dir = tempfile::tempdir().unwrap();
        let store = SledStore::open(dir.path(), None).unwrap();
        let records = fill(&store);
        let id = store.namespace(&namespace("rr")).unwrap();
        let (text, payload) = &records[190];
        let key = key(text.as_bytes(), id.0, 2);
        let shard = store.shard(text.as_bytes());
        let sound = shard.get(key).unwrap().unwrap();
        let mut value = sound.to_vec();
        value[100] ^= 1;
        shard.insert(key, value).unwrap();
        assert_eq!(store.lookup(text, &[id]).unwrap(), [None]);
        shard.remove(key).unwrap();
        assert_eq!(store.lookup(text, &[id]).unwrap(), [None]);
        assert_eq!(store.trouble().0, 2);
        shard.insert(key, sound).unwrap();
        assert_eq!(store.lookup(text, &[id]).unwrap(), [Some(payload.clone())]);
    }

    fn damage_each_shard(dir: &Path, name: &str, bytes: std::ops::Range<usize>) {
        for shard in 0..SHARDS {
            let file = dir.join(format!("v1/shard-{shard}")).join(name);
            let mut content = fs::read(&file).unwrap();
            let end = bytes.end.min(content.len());
            content[bytes.start..end].fill(0xff);
            fs::write(&file, content).unwrap();
        }
    }

    #[test]
    fn a_database_that_sled_must_not_open_is_set_aside_and_all_its_records_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let records = fill(&SledStore::open(dir.path(), None).unwrap());
        damage_each_shard(dir.path(), "conf", 0..64);
        for _ in 0..2 {
            let store = SledStore::open(dir.path(), None).unwrap();
            let id = store.namespace(&namespace("rr")).unwrap();
            for (text, payload) in &records {
                assert_eq!(store.lookup(text, &[id]).unwrap(), [Some(payload.clone())]);
            }
        }
        assert!(dir.path().join("v1/shard-0.damaged-0").exists() && !dir.path().join("v1/shard-0.damaged-1").exists());
    }

    #[test]
    fn a_damaged_log_costs_records_at_most_and_never_gives_a_wrong_one() {
        for start in [0, 5_000, 100_000, 600_000] {
            let dir = tempfile::tempdir().unwrap();
            let records = fill(&SledStore::open(dir.path(), None).unwrap());
            let length = fs::metadata(dir.path().join("v1/shard-0/db")).unwrap().len() as usize;
            damage_each_shard(dir.path(), "db", start.min(length)..start + 300);
            let store = SledStore::open(dir.path(), None).unwrap();
            let id = store.namespace(&namespace("rr")).unwrap();
            for (text, payload) in &records {
                let found = store.lookup(text, &[id]).unwrap().remove(0);
                assert!(found.is_none() || found.as_ref() == Some(payload), "a wrong record after damage at {start}");
            }
            store.insert(&records[9].0, id, &records[9].1).unwrap();
            store.flush().unwrap();
            assert_eq!(store.lookup(&records[9].0, &[id]).unwrap(), [Some(records[9].1.clone())]);
        }
    }

    #[test]
    fn beyond_its_limit_nothing_is_written_and_that_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let records = fill(&SledStore::open(dir.path(), None).unwrap());
        let store = SledStore::open(dir.path(), Some(1)).unwrap();
        let (id, late) = (store.namespace(&namespace("rr")).unwrap(), blake3::hash(b"late"));
        store.insert(&late, id, b"payload").unwrap();
        assert_eq!(store.lookup(&late, &[id]).unwrap(), [None]);
        assert_eq!(store.lookup(&records[5].0, &[id]).unwrap(), [Some(records[5].1.clone())]);
        assert_eq!(store.trouble().1, 1);
    }
}
