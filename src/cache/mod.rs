//! The score cache: what inference found out about a text, by the text's hash.
//!
//! Owns keys, the record codec, the [`ScoreStore`] trait and the sled store. Promises: a record that fails its checksum is a miss and
//! counted, never used; everything that can change a value is in its [`Namespace`]; nothing is evicted. Knows nothing of models or of corpora.

mod archive;
mod codec;
mod log;
mod sled_store;
mod v1;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

pub use archive::{Imported, export, import, merge};
pub use codec::{decode_curves, decode_edges, encode_curves, encode_edges};
use serde::{Deserialize, Serialize};
pub use sled_store::{Adopted, NamespaceStats, Prune, SledStore, StoreStats, Use};

/// What can go wrong with a cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// Another process uses the cache.
    #[error(
        "the score cache at {path} is in use by {holder}; wait for it to end, or give this run another cache with --set cache.path=DIR"
    )]
    Locked {
        /// Its folder.
        path: PathBuf,
        /// Who holds it, as it wrote itself down.
        holder: String,
    },
    /// Reading or writing failed.
    #[error("the score cache at {path}: {reason}; free space or mend permissions there, or choose another place with cache.path")]
    Io {
        /// Its folder.
        path: PathBuf,
        /// What failed.
        reason: String,
    },
    /// An archive of a cache could not be read or written.
    #[error("{path}: {reason}")]
    Archive {
        /// The file.
        path: PathBuf,
        /// What failed.
        reason: String,
    },
    /// The store turned out damaged in use.
    #[error("the score cache at {path} is damaged ({reason}); run again: it will be set aside and its sound records kept")]
    Damaged {
        /// Its folder.
        path: PathBuf,
        /// What sled said.
        reason: String,
    },
}

/// Number of a namespace within one store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(pub u32);

/// Everything that decides a kind of record, in words: two namespaces with the same words hold interchangeable records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespace {
    /// `edges`, or the readout of the scores.
    pub kind: String,
    /// What decides the values, name by name.
    pub fields: BTreeMap<String, String>,
}

impl Namespace {
    /// A namespace of the given fields.
    pub fn new<'a>(kind: &str, fields: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        Self { kind: kind.to_owned(), fields: fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect() }
    }

    /// Hash of the words, each with its length before it.
    #[must_use]
    pub fn hash(&self) -> blake3::Hash {
        let fields = self.fields.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]);
        crate::hash::words(std::iter::once(self.kind.as_str()).chain(fields))
    }
}

/// What a look-up found: the payloads of a text's records, in the order in which namespaces were asked for.
#[derive(Debug, Clone, Default)]
pub struct Records {
    /// All that was read.
    bytes: Vec<u8>,
    /// Where in it each payload lies.
    payloads: Vec<Option<Range<usize>>>,
}

impl Records {
    /// The payload in a namespace, by its place in the question; `None` for one that is missing or unsound.
    #[must_use]
    pub fn get(&self, place: usize) -> Option<&[u8]> {
        self.bytes.get(self.payloads.get(place)?.clone()?)
    }
}

/// Where records are kept.
pub trait ScoreStore: Send + Sync {
    /// The number of a namespace, which is written down if it is new.
    ///
    /// # Errors
    /// [`CacheError`] if the store cannot be read or written.
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, CacheError>;

    /// Writes down, from time to time, that a namespace is in use with a model.
    ///
    /// # Errors
    /// [`CacheError`] if the store cannot be written.
    fn used(&self, id: NamespaceId, model: &str) -> Result<(), CacheError>;

    /// All namespaces, by number.
    fn namespaces(&self) -> Vec<(NamespaceId, Namespace)>;

    /// The records of a text in the wanted namespaces.
    ///
    /// # Errors
    /// [`CacheError`] if the store cannot be read.
    fn lookup(&self, text: &blake3::Hash, wanted: &[NamespaceId]) -> Result<Records, CacheError>;

    /// Writes records of a text, together, and each of them once.
    ///
    /// # Errors
    /// [`CacheError`] if the store cannot be written.
    fn insert(&self, text: &blake3::Hash, records: &[(NamespaceId, &[u8])]) -> Result<(), CacheError>;

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// [`CacheError`] if the disk refuses.
    fn flush(&self) -> Result<(), CacheError>;

    /// Records found unsound, and records not written because the store is full or they are too large.
    fn trouble(&self) -> (u64, u64);
}

/// The store of `cache.mode = "off"`: keeps nothing.
#[derive(Debug, Default)]
pub struct NoStore;

impl ScoreStore for NoStore {
    fn namespace(&self, _: &Namespace) -> Result<NamespaceId, CacheError> {
        Ok(NamespaceId(0))
    }

    fn used(&self, _: NamespaceId, _: &str) -> Result<(), CacheError> {
        Ok(())
    }

    fn namespaces(&self) -> Vec<(NamespaceId, Namespace)> {
        Vec::new()
    }

    fn lookup(&self, _: &blake3::Hash, _: &[NamespaceId]) -> Result<Records, CacheError> {
        Ok(Records::default())
    }

    fn insert(&self, _: &blake3::Hash, _: &[(NamespaceId, &[u8])]) -> Result<(), CacheError> {
        Ok(())
    }

    fn flush(&self) -> Result<(), CacheError> {
        Ok(())
    }

    fn trouble(&self) -> (u64, u64) {
        (0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_hashes_are_length_prefixed() {
        let of = |name: &str, value: &str| Namespace::new("edges", [(name, value.to_owned())]).hash();
        assert_ne!(of("ab", "c"), of("a", "bc"));
        assert_ne!(Namespace::new("a", [("b", String::new())]).hash(), Namespace::new("ab", [("", String::new())]).hash());
    }
}
