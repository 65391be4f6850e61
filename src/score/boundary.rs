//! The embedding boundary: how little the texts on the two sides of an edge have in common, to a text encoder.

use std::ops::Range;
use std::sync::Arc;

use rayon::iter::ParallelIterator;
use rayon::slice::ParallelSlice;

use super::ScoreError;
use crate::model::{Encoder, EncoderScratch};
use crate::text::{Edge, Tokens};

/// Tokens of the language model that are embedded on each side of an edge.
pub const EMBED_TOKENS: usize = 64;

/// Texts that go through the encoder at once.
const BATCH: usize = 32;

/// Embeds the two sides of edges, on threads of its own.
#[derive(Debug)]
pub struct EmbeddingBoundary {
    encoder: Arc<Encoder>,
    pool: rayon::ThreadPool,
}

impl EmbeddingBoundary {
    /// Works with `threads` threads.
    ///
    /// # Errors
    /// [`ScoreError::Settings`] if they cannot be started.
    pub fn new(encoder: Arc<Encoder>, threads: usize) -> Result<Self, ScoreError> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(|i| format!("embed-{i}")).build();
        let pool = pool.map_err(|e| ScoreError::Settings(format!("cannot start embedding threads: {e}")))?;
        Ok(Self { encoder, pool })
    }

    /// One minus the cosine of the normalised embeddings of the text left and right of each edge: 0 for the same direction, up to 2.
    ///
    /// `sides` are byte ranges of `text`, see [`sides`]; white space at their ends is left out.
    ///
    /// # Errors
    /// [`ScoreError::Model`] if the encoder fails, [`ScoreError::NotFinite`] (with the number of the pair) if an embedding overflows.
    pub fn scores(&self, text: &str, sides: &[(Range<usize>, Range<usize>)]) -> Result<Vec<f32>, ScoreError> {
        let side = |range: &Range<usize>| text.get(range.clone()).unwrap_or_default().trim();
        let texts: Vec<&str> = sides.iter().flat_map(|(left, right)| [side(left), side(right)]).collect();
        let batches = texts.par_chunks(BATCH);
        let embed = |scratch: &mut EncoderScratch, texts: &[&str]| self.encoder.embed(texts, scratch);
        let found: Result<Vec<_>, _> = self.pool.install(|| batches.map_init(EncoderScratch::default, embed).collect());
        let embeddings: Vec<Vec<f64>> = found?.into_iter().flatten().collect();
        let score = |pair: &[Vec<f64>]| (1.0 - pair[0].iter().zip(&pair[1]).map(|(l, r)| l * r).sum::<f64>()) as f32;
        let found: Vec<f32> = embeddings.chunks_exact(2).map(score).collect();
        match found.iter().position(|s| !s.is_finite()) {
            Some(pair) => Err(ScoreError::NotFinite { edge: pair as u32 }),
            None => Ok(found),
        }
    }
}

/// Bytes of the [`EMBED_TOKENS`] tokens left and right of an edge; fewer at the ends of the document.
#[must_use]
pub fn sides(text: &str, tokens: &Tokens, edge: &Edge) -> (Range<usize>, Range<usize>) {
    let (b, byte) = (edge.token.0 as usize, edge.byte.0 as usize);
    let start_of = |token: usize| tokens.spans.get(token).map_or(text.len(), |span| text.floor_char_boundary(span.0));
    let (start, end) = (start_of(b.saturating_sub(EMBED_TOKENS)), start_of(b + EMBED_TOKENS));
    // A tokenizer's spans may be odd; the edge's own byte is not.
    (if b <= EMBED_TOKENS { 0 } else { start.min(byte) }..byte, byte..end.max(byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{ByteIdx, TokenIdx};
    use crate::text::EdgeKind;

    #[test]
    fn sides_are_64_tokens_each_or_what_there_is() {
        let text = "ab ".repeat(200);
        let tokens = Tokens { ids: vec![0; 200], spans: (0..200).map(|i| (i * 3, i * 3 + 2)).collect() };
        let at =
            |token: u32| sides(&text, &tokens, &Edge { token: TokenIdx(token), byte: ByteIdx(u64::from(token) * 3), kind: EdgeKind::Word });
        assert_eq!(at(100), (36 * 3..300, 300..164 * 3));
        assert_eq!(at(10), (0..30, 30..74 * 3));
        assert_eq!(at(190), (126 * 3..570, 570..600));
    }
}
