//! Caches of the first format, in which sled held the records themselves in blocks: they are read once, to be brought to the current one.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::sled_store::{Attempt, SledStore, attempt};
use super::{CacheError, Namespace, NamespaceId, ScoreStore};

/// Folder of the format.
pub(super) const DIR: &str = "v1";
const SHARDS: usize = 4;
/// Bytes of a key: text hash, namespace, block.
const KEY: usize = 32 + 4 + 2;
const MAGIC: [u8; 4] = *b"RRs1";
const HEADER: usize = 4 + KEY + 8 + 2 + 4 + 2;
const SEAL: usize = 8;
const NAMESPACE_KEY: [u8; 32] = *b"namespace description ..........";

/// A sealed block: magic, key, namespace hash, blocks, payload bytes of the record and of this block, payload, checksum.
struct Block<'a> {
    key: [u8; KEY],
    namespace: [u8; 8],
    blocks: u16,
    bytes: u32,
    payload: &'a [u8],
}

impl<'a> Block<'a> {
    fn open(bytes: &'a [u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (key, rest) = rest.split_first_chunk::<KEY>()?;
        let (namespace, rest) = rest.split_first_chunk::<8>()?;
        let (blocks, rest) = rest.split_first_chunk::<2>()?;
        let (total, rest) = rest.split_first_chunk::<4>()?;
        let (len, rest) = rest.split_first_chunk::<2>()?;
        let len = usize::from(u16::from_le_bytes(*len));
        let (payload, seal) = (rest.get(..len)?, rest.get(len..len + SEAL)?);
        let sound = blake3::hash(&bytes[..HEADER + len]).as_bytes()[..SEAL] == *seal;
        sound.then_some(Self {
            key: *key,
            namespace: *namespace,
            blocks: u16::from_le_bytes(*blocks),
            bytes: u32::from_le_bytes(*total),
            payload,
        })
    }

    fn id(&self) -> u32 {
        u32::from_be_bytes([self.key[32], self.key[33], self.key[34], self.key[35]])
    }

    fn number(&self) -> u16 {
        u16::from_be_bytes([self.key[36], self.key[37]])
    }
}

/// Copies every sound record to a store of the current format. A database that does not open is left out, with a warning: its documents are scored again.
pub(super) fn convert(path: &Path, store: &SledStore) -> Result<(), CacheError> {
    let mut namespaces: BTreeMap<u32, (Namespace, NamespaceId)> = BTreeMap::new();
    for shard in 0..SHARDS {
        let db = match attempt(&path.join(DIR).join(format!("shard-{shard}"))) {
            Attempt::Open(db) => db,
            Attempt::Failed(e) => return Err(CacheError::Io { path: path.to_owned(), reason: e.to_string() }),
            Attempt::Damaged(reason) => {
                tracing::warn!(event = "cache_rescued", %reason, shard, "a database of an old score cache is damaged: its documents are scored again");
                continue;
            }
        };
        if shard == 0 {
            for (_, value) in db.scan_prefix(NAMESPACE_KEY).flatten() {
                if let Some(block) = Block::open(&value)
                    && let Ok(namespace) = serde_json::from_slice::<Namespace>(block.payload)
                {
                    let id = store.namespace(&namespace)?;
                    namespaces.insert(block.id(), (namespace, id));
                }
            }
        }
        // Blocks of a record follow each other, and so do the records of a text.
        let mut waiting: HashMap<u32, (Vec<u8>, u16)> = HashMap::new();
        let mut since = 0;
        for (stored, value) in db.iter().flatten() {
            let Some(block) = Block::open(&value).filter(|b| b.key[..] == stored[..] && !stored.starts_with(&NAMESPACE_KEY)) else {
                continue;
            };
            let Some((namespace, id)) = namespaces.get(&block.id()) else { continue };
            if namespace.hash().as_bytes()[..8] != block.namespace {
                continue;
            }
            if block.number() == 0 {
                waiting.insert(block.id(), (Vec::new(), 0));
            }
            let Some((payload, next)) = waiting.get_mut(&block.id()).filter(|w| w.1 == block.number()) else { continue };
            payload.extend_from_slice(block.payload);
            *next += 1;
            if *next == block.blocks && payload.len() == block.bytes as usize {
                let mut text = [0; 32];
                text.copy_from_slice(&block.key[..32]);
                store.insert(&blake3::Hash::from_bytes(text), &[(*id, payload)])?;
                since += payload.len();
            }
            if since > 64 << 20 {
                since = 0;
                store.flush()?;
            }
        }
    }
    Ok(())
}
