//! The store on disk: a log of sealed records, an index of them in several sled databases by the first byte of the text hash, and a lock.
//!
//! The log is the truth. An index that does not open, has lost its contents or was not written to the end is made again from it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::codec::{Entry, KEY, MAX_PAYLOAD, key};
use super::log::{Place, ValueLog, folder_bytes};
use super::{CacheError, Namespace, NamespaceId, Records, ScoreStore, v1};

/// Folder of the current format; another format gets another folder.
const VERSION_DIR: &str = "v2";
/// A store that is being written anew, and the one it takes the place of.
const FRESH_DIR: &str = "v2.new";
const OLD_DIR: &str = "v2.old";
const SHARDS: usize = 4;
/// sled's page cache per database. Its real use of memory can be several times as much.
const SHARD_CACHE_BYTES: u64 = 16 << 20;
/// Keys of namespace descriptions begin with this instead of a text hash.
const NAMESPACE_KEY: [u8; 32] = *b"namespace description ..........";
/// Bytes of one record in the value of the index: namespace and place.
const ITEM: usize = 4 + Place::BYTES;
/// Up to where in the log a database knows all records.
const WATERMARK: &[u8] = b"watermark";
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

/// What can go wrong while the log is gone through.
enum Scanned {
    Io(std::io::Error),
    Cache(CacheError),
}

impl From<std::io::Error> for Scanned {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<CacheError> for Scanned {
    fn from(error: CacheError) -> Self {
        Self::Cache(error)
    }
}

impl Scanned {
    fn of(self, path: &Path) -> CacheError {
        match self {
            Self::Io(error) => io(path)(error),
            Self::Cache(error) => error,
        }
    }
}

/// The records of a text in the index: namespaces and places.
fn items(value: &[u8]) -> impl Iterator<Item = (u32, Place)> {
    value.as_chunks::<ITEM>().0.iter().filter_map(|item| {
        let (id, place) = item.split_first_chunk::<4>()?;
        Some((u32::from_be_bytes(*id), Place::decode(place)?))
    })
}

/// The store: log and index.
pub struct SledStore {
    path: PathBuf,
    log: ValueLog,
    shards: Vec<sled::Db>,
    /// Writers hold it shared from the log to the index; a flush holds it alone while it reads where the log ends.
    writing: RwLock<()>,
    /// Namespaces by number, each with its [tag].
    namespaces: Mutex<BTreeMap<u32, (Namespace, [u8; 8])>>,
    uses: Mutex<BTreeMap<u32, Use>>,
    /// Nothing is written.
    read_only: bool,
    max_bytes: Option<u64>,
    full: AtomicBool,
    /// Whether anything was written since the last flush.
    dirty: AtomicBool,
    unsound: AtomicU64,
    unwritten: AtomicU64,
    /// Held while the store is open.
    _lock: File,
}

impl SledStore {
    /// Opens the store in folder `path`, made if absent. `max_bytes` bounds its size on disk: beyond it nothing more is written.
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
        Self::is_at(path).then(|| Self::open_as(path, None, true)).transpose()
    }

    /// Whether there is a store in folder `path`.
    #[must_use]
    pub fn is_at(path: &Path) -> bool {
        [VERSION_DIR, OLD_DIR, v1::DIR].iter().any(|dir| path.join(dir).is_dir())
    }

    fn open_as(path: &Path, max_bytes: Option<u64>, read_only: bool) -> Result<Self, CacheError> {
        fs::create_dir_all(path).map_err(io(path))?;
        let lock = take_lock(path, &path.join("lock"))?;
        finish_rewrite(path)?;
        if path.join(v1::DIR).is_dir() && !path.join(VERSION_DIR).is_dir() {
            tracing::info!(event = "cache_converted", path = %path.display(), "the score cache is brought to the current format");
            let fresh = Self::open_in(path, &path.join(FRESH_DIR), lock.try_clone().map_err(io(path))?, None, false)?;
            v1::convert(path, &fresh)?;
            fresh.flush()?;
            drop(fresh);
            put_in_place(path)?;
        }
        Self::open_in(path, &path.join(VERSION_DIR), lock, max_bytes, read_only)
    }

    fn open_in(path: &Path, dir: &Path, lock: File, max_bytes: Option<u64>, read_only: bool) -> Result<Self, CacheError> {
        fs::create_dir_all(dir).map_err(io(path))?;
        let suspect = dir.join("suspect").exists();
        let log = ValueLog::open(dir).map_err(io(path))?;
        let mut shards = Vec::new();
        for shard in 0..SHARDS {
            shards.push(open_shard(path, &dir.join(format!("shard-{shard}")), suspect, log.tail() == Place::default())?);
        }
        let mut store = Self {
            path: path.to_owned(),
            log,
            shards,
            writing: RwLock::new(()),
            namespaces: Mutex::default(),
            uses: Mutex::default(),
            read_only,
            max_bytes,
            full: AtomicBool::new(false),
            dirty: AtomicBool::new(false),
            unsound: AtomicU64::new(0),
            unwritten: AtomicU64::new(0),
            _lock: lock,
        };
        store.index_the_rest()?;
        if suspect {
            fs::remove_file(dir.join("suspect")).map_err(io(path))?;
        }
        store.read_namespaces()?;
        store.check_size()?;
        Ok(store)
    }

    /// Indexes what lies in the log behind the watermarks: what was written before a process died, or all of it for a database made anew.
    fn index_the_rest(&self) -> Result<(), CacheError> {
        let mut marks = Vec::new();
        for shard in &self.shards {
            let mark = shard.get(WATERMARK).map_err(|e| self.failed(&e))?;
            marks.push(mark.and_then(|m| Place::decode(&m)).unwrap_or_default());
        }
        let from = marks.iter().min().copied().unwrap_or_default();
        if from == self.log.tail() {
            return Ok(());
        }
        let (mut found, mut since, mut end) = (0_u64, 0_usize, from);
        let scanned = self.log.scan(from, |place, entry| {
            let number = self.number(&entry.key);
            end = place.behind();
            if place >= marks[number] {
                // A record is written once; should the log hold it twice, the first sound one counts.
                found += u64::from(self.index(&entry.key[..32], &[(namespace_of(&entry.key), place)], false)?);
                since += 1;
            }
            if since == 100_000 {
                since = 0;
                self.flush_index(place)?;
            }
            Ok::<_, Scanned>(())
        });
        scanned.map_err(|e| e.of(&self.path))?;
        // What a process that died, or a full disk, left of a last record.
        self.log.cut_off(end).map_err(io(&self.path))?;
        self.flush_index(self.log.tail())?;
        if found > 0 {
            tracing::info!(
                event = "cache_indexed",
                records = found,
                "records of the score cache were indexed that an earlier process had left so"
            );
        }
        Ok(())
    }

    /// Makes the index durable, complete up to a place of the log.
    fn flush_index(&self, upto: Place) -> Result<(), CacheError> {
        for shard in &self.shards {
            shard.insert(WATERMARK, &upto.encode()[..]).and_then(|_| shard.flush()).map_err(|e| self.failed(&e))?;
        }
        Ok(())
    }

    fn read_namespaces(&mut self) -> Result<(), CacheError> {
        let (mut namespaces, mut uses) = (BTreeMap::new(), BTreeMap::new());
        let described = self.shards[self.number(&NAMESPACE_KEY)].get(NAMESPACE_KEY).map_err(|e| self.failed(&e))?.unwrap_or_default();
        for (id, place) in items(&described) {
            let bytes = self.log.read(place).map_err(io(&self.path))?.unwrap_or_default();
            if let Ok((entry, _)) = Entry::open(&bytes)
                && entry.key == key(&NAMESPACE_KEY, id)
                && let Ok(namespace) = serde_json::from_slice::<Namespace>(entry.payload)
            {
                let tag = tag(&namespace);
                namespaces.insert(id, (namespace, tag));
            }
        }
        for item in self.shards[0].scan_prefix(USE_KEY) {
            let (key, value) = item.map_err(|e| self.failed(&e))?;
            if let (Ok(key), Ok(used)) = (<[u8; KEY]>::try_from(&key[..]), serde_json::from_slice::<Use>(&value)) {
                uses.insert(namespace_of(&key), used);
            }
        }
        (self.namespaces, self.uses) = (Mutex::new(namespaces), Mutex::new(uses));
        Ok(())
    }

    /// Number of the database that knows a text.
    fn number(&self, text: &[u8]) -> usize {
        usize::from(text[0]) * SHARDS / 256
    }

    /// Writes down where records of a text lie: in place of what is known of them, or only if nothing is. Says whether that changed anything.
    fn index(&self, text: &[u8], new: &[(u32, Place)], replace: bool) -> Result<bool, CacheError> {
        let mut changed = false;
        let update = |old: Option<&[u8]>| {
            let old: Vec<(u32, Place)> = items(old.unwrap_or_default()).collect();
            let is_in = |list: &[(u32, Place)], id: u32| list.iter().any(|(other, _)| *other == id);
            let (keep, add): (Vec<_>, Vec<_>) = match replace {
                true => (old.iter().filter(|(id, _)| !is_in(new, *id)).collect(), new.iter().collect()),
                false => (old.iter().collect(), new.iter().filter(|(id, _)| !is_in(&old, *id)).collect()),
            };
            changed = !add.is_empty();
            Some(keep.into_iter().chain(add).flat_map(|(id, place)| [&id.to_be_bytes()[..], &place.encode()].concat()).collect::<Vec<u8>>())
        };
        self.shards[self.number(text)].fetch_and_update(text, update).map_err(|e| self.failed(&e))?;
        Ok(changed)
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
        let index = self.shards.iter().map(|s| s.size_on_disk().map_err(|e| self.failed(&e))).sum::<Result<u64, _>>()?;
        Ok(index + self.log.bytes().map_err(io(&self.path))?)
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
        let mut by_id: BTreeMap<u32, NamespaceStats> = self
            .namespaces()
            .into_iter()
            .map(|(NamespaceId(id), namespace)| {
                (id, NamespaceStats { id, namespace, used: self.uses().get(&id).cloned(), records: 0, payload_bytes: 0 })
            })
            .collect();
        let unsound = self.for_each_entry(|entry| {
            if let Some(stats) = by_id.get_mut(&namespace_of(&entry.key)).filter(|_| !entry.key.starts_with(&NAMESPACE_KEY)) {
                stats.records += 1;
                stats.payload_bytes += entry.payload.len() as u64;
            }
            Ok(())
        })?;
        Ok(StoreStats {
            path: self.path.clone(),
            disk_bytes: self.disk_bytes()?,
            namespaces: by_id.into_values().collect(),
            unsound_blocks: unsound,
        })
    }

    /// Goes through the log, with every entry that the index knows at its place. Returns how many stretches of the log were unsound, and how many entries the
    /// index should know and does not.
    fn for_each_entry(&self, mut take: impl FnMut(&Entry<'_>) -> Result<(), CacheError>) -> Result<u64, CacheError> {
        let mut lost = 0;
        let scanned = self.log.scan(Place::default(), |place, entry| {
            let text = &entry.key[..32];
            let known = self.shards[self.number(text)].get(text).map_err(|e| self.failed(&e))?.unwrap_or_default();
            match items(&known).find(|(id, _)| *id == namespace_of(&entry.key)) {
                Some((_, known)) if known == place => take(entry)?,
                Some(_) => {}
                None => lost += 1,
            }
            Ok::<_, Scanned>(())
        });
        let unsound = scanned.map_err(|e| e.of(&self.path))?;
        Ok(unsound + lost)
    }

    fn uses(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Use>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `take` with every sound record, in the order they were written. Returns how many were unsound.
    ///
    /// # Errors
    /// [`CacheError`] if the store cannot be read, or of `take`.
    pub fn for_each_record(
        &self,
        mut take: impl FnMut(blake3::Hash, NamespaceId, &[u8]) -> Result<(), CacheError>,
    ) -> Result<u64, CacheError> {
        let tags: BTreeMap<u32, [u8; 8]> = self.known().iter().map(|(&id, (_, tag))| (id, *tag)).collect();
        let mut strange = 0;
        let unsound = self.for_each_entry(|entry| {
            if entry.key.starts_with(&NAMESPACE_KEY) {
                return Ok(());
            }
            let id = namespace_of(&entry.key);
            if tags.get(&id) != Some(&entry.namespace) {
                strange += 1;
                return Ok(());
            }
            let mut hash = [0; 32];
            hash.copy_from_slice(&entry.key[..32]);
            take(blake3::Hash::from_bytes(hash), NamespaceId(id), entry.payload)
        })?;
        Ok(unsound + strange)
    }

    /// Takes a record of another cache, unless it is there.
    ///
    /// # Errors
    /// [`CacheError`] if the store cannot be written.
    pub fn adopt(&self, text: &blake3::Hash, namespace: &Namespace, payload: &[u8]) -> Result<Adopted, CacheError> {
        let id = self.namespace(namespace)?;
        if self.lookup(text, &[id])?.get(0).is_some() {
            return Ok(Adopted::Known);
        }
        let before = self.unwritten.load(Ordering::Relaxed);
        self.insert(text, &[(id, payload)])?;
        Ok(if self.unwritten.load(Ordering::Relaxed) > before { Adopted::Refused } else { Adopted::Taken })
    }

    /// The namespaces that would be removed.
    #[must_use]
    pub fn to_prune(&self, prune: &Prune) -> Vec<NamespaceId> {
        let uses = self.uses();
        self.namespaces().into_iter().filter(|(id, n)| prune.takes(n, uses.get(&id.0), now())).map(|(id, _)| id).collect()
    }

    /// Writes the store anew without some namespaces and without what is unsound; this gives their space back. Needs room for both at once. Killed at any
    /// instant, the store is as it was or as it will be. Returns the bytes on disk before and after.
    ///
    /// # Errors
    /// [`CacheError`] if the disk refuses; nothing is lost.
    pub fn rewrite(self, without: &[NamespaceId]) -> Result<(u64, u64), CacheError> {
        let path = self.path.clone();
        let place = path.join(VERSION_DIR);
        let before = folder_bytes(&place);
        let lock = self._lock.try_clone().map_err(io(&path))?;
        let new = Self::open_in(&path, &path.join(FRESH_DIR), lock, None, false)?;
        let mut since = 0;
        self.for_each_entry(|entry| {
            if without.contains(&NamespaceId(namespace_of(&entry.key))) {
                return Ok(());
            }
            since += entry.payload.len();
            new.write(&[entry])?;
            if since > 256 << 20 {
                since = 0;
                new.flush()?;
            }
            Ok(())
        })?;
        for (id, used) in self.uses().iter().filter(|(id, _)| !without.contains(&NamespaceId(**id))) {
            let payload = serde_json::to_vec(used).unwrap_or_default();
            new.shards[0].insert(key(&USE_KEY, *id), payload).map_err(|e| new.failed(&e))?;
        }
        new.flush()?;
        // The databases let go of their files.
        let Self { shards, _lock, .. } = self;
        drop((shards, new));
        put_in_place(&path)?;
        Ok((before, folder_bytes(&place)))
    }

    /// Appends entries of one text in one piece and indexes them.
    fn write(&self, entries: &[&Entry<'_>]) -> Result<(), CacheError> {
        let (mut bytes, mut lengths) = (Vec::new(), Vec::new());
        for entry in entries {
            let start = bytes.len();
            entry.seal(&mut bytes);
            lengths.push((bytes.len() - start) as u32);
        }
        let _shared = self.writing.read().unwrap_or_else(PoisonError::into_inner);
        self.dirty.store(true, Ordering::Release);
        let mut place = self.log.append(&bytes).map_err(io(&self.path))?;
        let mut new = Vec::with_capacity(entries.len());
        for (entry, length) in entries.iter().zip(lengths) {
            place.length = length;
            new.push((namespace_of(&entry.key), place));
            place.offset += u64::from(length);
        }
        match entries.first() {
            Some(first) => self.index(&first.key[..32], &new, true).map(drop),
            None => Ok(()),
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<u32, (Namespace, [u8; 8])>> {
        self.namespaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts the store that was built anew in the place of the one there is, and removes that. Nothing is removed before the new one is durably there.
fn put_in_place(path: &Path) -> Result<(), CacheError> {
    let (place, fresh) = (path.join(VERSION_DIR), path.join(FRESH_DIR));
    kill_point!("before-cache-swap");
    if place.exists() {
        fs::rename(&place, path.join(OLD_DIR)).map_err(io(path))?;
    }
    kill_point!("between-cache-swap");
    fs::rename(&fresh, &place).map_err(io(path))?;
    File::open(path).and_then(|folder| folder.sync_all()).map_err(io(path))?;
    kill_point!("after-cache-swap");
    finish_rewrite(path)
}

/// Brings a rewrite, or a conversion, that was cut short to an end.
fn finish_rewrite(path: &Path) -> Result<(), CacheError> {
    let (place, fresh, old) = (path.join(VERSION_DIR), path.join(FRESH_DIR), path.join(OLD_DIR));
    if old.exists() && !place.exists() {
        fs::rename(&old, &place).map_err(io(path))?;
    }
    for left in [old, fresh].into_iter().filter(|p| p.exists()) {
        fs::remove_dir_all(left).map_err(io(path))?;
    }
    // A conversion that was done but for this.
    if place.exists() && path.join(v1::DIR).is_dir() {
        fs::remove_dir_all(path.join(v1::DIR)).map_err(io(path))?;
    }
    Ok(())
}

impl ScoreStore for SledStore {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, CacheError> {
        let mut known = self.known();
        if let Some((&id, _)) = known.iter().find(|(_, (n, _))| n == namespace) {
            return Ok(NamespaceId(id));
        }
        if self.read_only {
            // No record has this number.
            return Ok(NamespaceId(u32::MAX));
        }
        let id = known.last_key_value().map_or(1, |(&last, _)| last + 1);
        let payload = serde_json::to_vec(namespace).unwrap_or_default();
        let tag = tag(namespace);
        self.write(&[&Entry { key: key(&NAMESPACE_KEY, id), namespace: tag, payload: &payload }])?;
        known.insert(id, (namespace.clone(), tag));
        drop(known);
        self.flush()?;
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
        self.dirty.store(true, Ordering::Release);
        self.shards[0].insert(key(&USE_KEY, id.0), payload).map(drop).map_err(|e| self.failed(&e))
    }

    fn namespaces(&self) -> Vec<(NamespaceId, Namespace)> {
        self.known().iter().map(|(&id, (n, _))| (NamespaceId(id), n.clone())).collect()
    }

    fn lookup(&self, text: &blake3::Hash, wanted: &[NamespaceId]) -> Result<Records, CacheError> {
        let mut places: Vec<(Place, usize)> = Vec::with_capacity(wanted.len());
        let known = self.shards[self.number(text.as_bytes())].get(text.as_bytes()).map_err(|e| self.failed(&e))?.unwrap_or_default();
        for (id, place) in items(&known) {
            let Some(i) = wanted.iter().position(|wanted| wanted.0 == id) else { continue };
            if place.length as usize > MAX_PAYLOAD + 1024 {
                self.unsound.fetch_add(1, Ordering::Relaxed);
            } else {
                places.push((place, i));
            }
        }
        places.sort_unstable();
        let (bytes, ranges) = self.log.read_all(places.iter().map(|p| p.0)).map_err(io(&self.path))?;
        let mut payloads = vec![None; wanted.len()];
        // The lock is let go of before checksums are computed: other threads look up too.
        let tags: Vec<Option<[u8; 8]>> = {
            let known = self.known();
            wanted.iter().map(|id| known.get(&id.0).map(|(_, tag)| *tag)).collect()
        };
        for (range, (_, i)) in ranges.into_iter().zip(places) {
            let own = key(text.as_bytes(), wanted[i].0);
            let sound = range
                .clone()
                .zip(range.and_then(|range| Entry::open(&bytes[range]).ok()))
                .filter(|(range, (entry, length))| entry.key == own && Some(entry.namespace) == tags[i] && *length == range.len());
            match sound {
                Some((range, (entry, _))) => {
                    let start = range.start + Entry::PAYLOAD;
                    payloads[i] = Some(start..start + entry.payload.len());
                }
                None => drop(self.unsound.fetch_add(1, Ordering::Relaxed)),
            }
        }
        Ok(Records { bytes, payloads })
    }

    fn insert(&self, text: &blake3::Hash, records: &[(NamespaceId, &[u8])]) -> Result<(), CacheError> {
        let refuse = |count: usize| {
            self.unwritten.fetch_add(count as u64, Ordering::Relaxed);
            Ok(())
        };
        if self.read_only || self.full.load(Ordering::Relaxed) {
            return refuse(records.len());
        }
        let mut entries = Vec::with_capacity(records.len());
        for (id, payload) in records {
            match self.known().get(&id.0).map(|(_, tag)| *tag).filter(|_| payload.len() <= MAX_PAYLOAD) {
                Some(namespace) => entries.push(Entry { key: key(text.as_bytes(), id.0), namespace, payload }),
                None => refuse(1)?,
            }
        }
        self.write(&entries.iter().collect::<Vec<_>>())
    }

    fn flush(&self) -> Result<(), CacheError> {
        if self.read_only {
            return Ok(());
        }
        let upto = {
            let _alone = self.writing.write().unwrap_or_else(PoisonError::into_inner);
            if !self.dirty.swap(false, Ordering::AcqRel) {
                return Ok(());
            }
            self.log.tail()
        };
        // What the index points at is durable before the index is.
        let flushed = self.log.sync().map_err(io(&self.path)).and_then(|_| self.flush_index(upto));
        if flushed.is_err() {
            self.dirty.store(true, Ordering::Release);
        }
        flushed?;
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

/// What came of an attempt to open a database.
pub(super) enum Attempt {
    Open(sled::Db),
    Damaged(String),
    Failed(std::io::Error),
}

pub(super) fn attempt(dir: &Path) -> Attempt {
    let open = || sled::Config::new().path(dir).cache_capacity(SHARD_CACHE_BYTES).flush_every_ms(None).open();
    match std::panic::catch_unwind(AssertUnwindSafe(open)) {
        Ok(Ok(db)) => Attempt::Open(db),
        Ok(Err(sled::Error::Io(e))) if e.kind() != std::io::ErrorKind::InvalidData && e.kind() != std::io::ErrorKind::UnexpectedEof => {
            Attempt::Failed(e)
        }
        Ok(Err(e)) => Attempt::Damaged(e.to_string()),
        Err(_) => Attempt::Damaged("sled panicked on opening it".into()),
    }
}

/// Opens one database of the index. One that is damaged, or has lost its contents although the log has some, is made anew.
fn open_shard(path: &Path, dir: &Path, suspect: bool, log_is_empty: bool) -> Result<sled::Db, CacheError> {
    let mut reason = String::from("a run found it damaged");
    let new = !dir.exists();
    for again in [false, true] {
        if (again || suspect) && dir.exists() {
            tracing::warn!(event = "cache_rescued", %reason, dir = %dir.display(), "an index of the score cache was damaged; it is made again from its log");
            fs::remove_dir_all(dir).map_err(io(path))?;
        }
        match attempt(dir) {
            Attempt::Open(db) => {
                let whole = again
                    || new
                    || suspect
                    || log_is_empty
                    || matches!(db.get(WATERMARK), Ok(Some(mark)) if Place::decode(&mark).is_some());
                if whole {
                    return Ok(db);
                }
                reason = "it has lost its contents".into();
            }
            Attempt::Failed(e) => return Err(io(path)(e)),
            Attempt::Damaged(why) => reason = why,
        }
    }
    Err(CacheError::Damaged { path: path.to_owned(), reason })
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
            store.insert(text, &[(id, payload)]).unwrap();
        }
        store.flush().unwrap();
        records
    }

    fn payloads(store: &SledStore, text: &blake3::Hash, wanted: &[NamespaceId]) -> Vec<Option<Vec<u8>>> {
        let records = store.lookup(text, wanted).unwrap();
        (0..wanted.len()).map(|i| records.get(i).map(<[u8]>::to_vec)).collect()
    }

    /// All records are there.
    fn holds(dir: &Path, records: &[(blake3::Hash, Vec<u8>)], what: &str) {
        let store = SledStore::open(dir, None).unwrap();
        let id = store.namespace(&namespace("rr")).unwrap();
        for (text, payload) in records {
            assert!(payloads(&store, text, &[id]) == [Some(payload.clone())], "{what}");
        }
        assert_eq!((store.stats().unwrap().namespaces[0].records, store.trouble()), (200, (0, 0)), "{what}");
    }

    #[test]
    fn records_of_any_size_come_back_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let records = fill(&SledStore::open(dir.path(), None).unwrap());
        let store = SledStore::open(dir.path(), None).unwrap();
        let (rr, lr) = (store.namespace(&namespace("rr")).unwrap(), store.namespace(&namespace("lr")).unwrap());
        for (text, payload) in &records {
            assert_eq!(payloads(&store, text, &[lr, rr]), [None, Some(payload.clone())]);
        }
        // Several at once, in any order of asking.
        store.insert(&records[7].0, &[(lr, b"late")]).unwrap();
        assert_eq!(payloads(&store, &records[7].0, &[lr, rr]), [Some(b"late".to_vec()), Some(records[7].1.clone())]);
        let both = blake3::hash(b"both");
        store.insert(&both, &[(rr, b"one"), (lr, b"two")]).unwrap();
        assert_eq!(payloads(&store, &both, &[lr, rr]), [Some(b"two".to_vec()), Some(b"one".to_vec())]);
        let stats = store.stats().unwrap();
        assert_eq!((stats.namespaces[0].records, stats.namespaces[1].records, stats.unsound_blocks), (201, 2, 0));
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
        let records = fill(&SledStore::open(dir.path(), None).unwrap());
        let log = dir.path().join("v2/values-00000.log");
        let mut bytes = fs::read(&log).unwrap();
        let (text, payload) = &records[190];
        let at = bytes.windows(32).position(|w| w == text.as_bytes()).unwrap();
        bytes[at + 200] ^= 1;
        fs::write(&log, &bytes).unwrap();
        let store = SledStore::open(dir.path(), None).unwrap();
        let id = store.namespace(&namespace("rr")).unwrap();
        assert_eq!(payloads(&store, text, &[id]), [None]);
        assert_eq!((store.trouble().0, store.stats().unwrap().unsound_blocks), (1, 1));
        // Scored again, it is written again, and found from then on.
        store.insert(text, &[(id, payload)]).unwrap();
        assert_eq!(payloads(&store, text, &[id]), [Some(payload.clone())]);
        assert_eq!(store.stats().unwrap().namespaces[0].records, 200);
    }

    #[test]
    fn an_index_that_is_damaged_or_gone_is_made_again_from_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let records = fill(&SledStore::open(dir.path(), None).unwrap());
        for (name, bytes) in [("conf", 0..64), ("db", 0..100), ("db", 500..900), ("db", 0..usize::MAX)] {
            for shard in 0..SHARDS {
                let file = dir.path().join(format!("v2/shard-{shard}")).join(name);
                let mut content = fs::read(&file).unwrap();
                let end = bytes.end.min(content.len());
                content[bytes.start.min(end)..end].fill(0xff);
                fs::write(&file, content).unwrap();
            }
            holds(dir.path(), &records, &format!("{name} {bytes:?}"));
        }
        fs::remove_dir_all(dir.path().join("v2/shard-2")).unwrap();
        holds(dir.path(), &records, "a lost database");
        File::create(dir.path().join("v2/suspect")).unwrap();
        holds(dir.path(), &records, "a suspect store");
    }

    #[test]
    fn what_reached_the_log_before_a_process_died_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let store = SledStore::open(dir.path(), None).unwrap();
        let id = store.namespace(&namespace("rr")).unwrap();
        drop(store);
        // Entries that no index knows, the last one torn.
        let mut bytes = Vec::new();
        for i in 0..3_u8 {
            Entry { key: key(blake3::hash(&[i]).as_bytes(), id.0), namespace: tag(&namespace("rr")), payload: &[i; 50] }.seal(&mut bytes);
        }
        let mut file = File::options().append(true).open(dir.path().join("v2/values-00000.log")).unwrap();
        file.write_all(&bytes[..bytes.len() - 1]).unwrap();
        for _ in 0..2 {
            let store = SledStore::open(dir.path(), None).unwrap();
            let found = |i: u8| payloads(&store, &blake3::hash(&[i]), &[id]).remove(0);
            assert_eq!([found(0), found(1), found(2)], [Some(vec![0; 50]), Some(vec![1; 50]), None]);
            assert_eq!(store.trouble(), (0, 0));
        }
        let store = SledStore::open(dir.path(), None).unwrap();
        store.insert(&blake3::hash(&[2]), &[(id, &[2; 50])]).unwrap();
        assert_eq!(payloads(&store, &blake3::hash(&[2]), &[id]), [Some(vec![2; 50])]);
    }

    #[test]
    fn beyond_its_limit_nothing_is_written_and_that_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let records = fill(&SledStore::open(dir.path(), None).unwrap());
        let store = SledStore::open(dir.path(), Some(1)).unwrap();
        let (id, late) = (store.namespace(&namespace("rr")).unwrap(), blake3::hash(b"late"));
        store.insert(&late, &[(id, b"payload")]).unwrap();
        assert_eq!(payloads(&store, &late, &[id]), [None]);
        assert_eq!(payloads(&store, &records[5].0, &[id]), [Some(records[5].1.clone())]);
        assert_eq!(store.trouble().1, 1);
    }
}
