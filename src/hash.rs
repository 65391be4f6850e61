//! Hashes that keys, identities and manifests are made of.

use std::fs::File;
use std::path::Path;

/// blake3 of a file's bytes.
pub(crate) fn file(path: &Path) -> std::io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok(hasher.finalize())
}

/// blake3 of words, each with its length before it, so that ("ab", "c") and ("a", "bc") differ.
pub(crate) fn words<'a>(words: impl IntoIterator<Item = &'a str>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for word in words {
        hasher.update(&(word.len() as u64).to_le_bytes());
        hasher.update(word.as_bytes());
    }
    hasher.finalize()
}
