//! Text: tokens with byte offsets, and the edges a document may be cut at.
//!
//! Owns tokenizer loading, offsets, sentence and word boundaries and candidate edges. Promises: an edge never lies inside a Unicode
//! scalar value or a grapheme cluster, work is linear in the text, odd offsets of a tokenizer make edges illegal and never fail a
//! document. Knows nothing of models' weights or of files other than a tokenizer's.

mod boundaries;
mod edges;
mod tokenizer;

pub use edges::{Edge, EdgeKind, EdgePolicy, Edges, find_edges};
pub use tokenizer::{BLOCK_BYTES, TOKENIZERS_VERSION, TextError, Tokenizer, Tokens};

/// The boundary segmenter and its data: part of the key of cached edges, since another version may draw other boundaries.
pub const SEGMENTER_VERSION: &str = "icu_segmenter 2.4.0, icu_segmenter_data 2.4.0, icu_properties_data 2.4.0, auto";
