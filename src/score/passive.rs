//! What Right Reset is compared with: scores that remove no prefix. They read one uninterrupted pass (paper, appendix A.2), or the text alone.
//!
//! All are oriented so that larger favours a cut. Where the paper leaves a definition open, this file is it.

use std::sync::Arc;

use super::{ScoreError, ScoreSpec};
use crate::model::ops::{self, HeadScratch};
use crate::model::{Batch, Scratch, Tap, Trunk};
use crate::text::{Edge, EdgeKind};

/// Tokens on each side whose embeddings [`Comparator::EmbeddingJump`] compares.
const EMBEDDING_TOKENS: usize = 8;

/// A score to compare with. W, s and the layer are those of Right Reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Comparator {
    /// -log p of the first token on the right.
    BoundarySurprisal,
    /// Mean -log p of the tokens x[b+t], t = s+1..m-1.
    WindowSurprisal,
    /// How much lower the mean -log p of the W tokens before the edge is than that of the W before those, and of the W after: (before - here) + (after - here).
    /// A minimum of perplexity (Zhao et al.) ends where its unit ends. What lies outside the document adds nothing.
    PplMinimum,
    /// Less the share of attention that goes from the window to the tokens before it, averaged over the window's tokens and the heads of the layer.
    AttentionIsolation,
    /// 1 - cosine of the states of the tokens on both sides.
    ResidualJump,
    /// 1 - cosine of the mean states of W tokens on both sides.
    LocalHiddenDistance,
    /// 1 - cosine of the mean input embeddings of 8 tokens on both sides.
    EmbeddingJump,
    /// 1 at the end of a sentence, else 0.
    Sentence,
    /// What stands before the edge: 5 a blank line, 4 a line's end, 3 the end of a sentence, 2 a semicolon or colon, 1 a comma, else 0. Closing quotation marks and brackets are looked through.
    Punctuation,
    /// Less the tokens to the nearest multiple of the target length.
    FixedGrid,
    /// A number of the seed, the text and the edge.
    Random,
}

impl Comparator {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::BoundarySurprisal,
        Self::WindowSurprisal,
        Self::PplMinimum,
        Self::AttentionIsolation,
        Self::ResidualJump,
        Self::LocalHiddenDistance,
        Self::EmbeddingJump,
        Self::Sentence,
        Self::Punctuation,
        Self::FixedGrid,
        Self::Random,
    ];

    /// Its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BoundarySurprisal => "boundary_surprisal",
            Self::WindowSurprisal => "window_surprisal",
            Self::PplMinimum => "ppl_minimum",
            Self::AttentionIsolation => "attention_isolation",
            Self::ResidualJump => "residual_jump",
            Self::LocalHiddenDistance => "local_hidden_distance",
            Self::EmbeddingJump => "embedding_jump",
            Self::Sentence => "sentence",
            Self::Punctuation => "punctuation",
            Self::FixedGrid => "fixed_grid",
            Self::Random => "random",
        }
    }

    /// Whether it reads a pass of the model.
    #[must_use]
    pub fn needs_model(self) -> bool {
        !matches!(self, Self::Sentence | Self::Punctuation | Self::FixedGrid | Self::Random)
    }
}

/// Scores by [`Comparator`]s that read the model.
pub struct Passive {
    trunk: Arc<dyn Trunk>,
    spec: ScoreSpec,
    layer: Tap,
    attention: Tap,
}

/// Buffers of [`Passive::scores`], one per thread.
#[derive(Default)]
pub struct PassiveScratch {
    model: Scratch,
    head: HeadScratch,
}

impl Passive {
    /// Reads at the layer, with the window and the segments that `spec` has for RR.
    ///
    /// # Errors
    /// [`ScoreError::Settings`] if it has no RR, reads it before the first block, or if the trunk came without its head.
    pub fn new(trunk: Arc<dyn Trunk>, spec: ScoreSpec) -> Result<Self, ScoreError> {
        spec.validate()?;
        let block = match spec.readouts.rr {
            Some(Tap::Layer(k)) if k > 0 => k,
            Some(Tap::Final) => trunk.shape().layers,
            _ => return Err(ScoreError::Settings("comparators read the layer of rr: it must be 1 or more".into())),
        };
        if trunk.head().is_none() {
            return Err(ScoreError::Settings("surprisal needs the model's output head, which was not loaded".into()));
        }
        let (layer, keys) = (spec.readouts.rr.unwrap_or(Tap::Final), spec.window as usize);
        Ok(Self { trunk, spec, layer, attention: Tap::Attention { block, keys } })
    }

    /// The model.
    #[must_use]
    pub fn trunk(&self) -> &dyn Trunk {
        self.trunk.as_ref()
    }

    /// The scores of edges of a document by each comparator, in their order; NaN where an edge has too little on a side.
    ///
    /// # Errors
    /// [`ScoreError`] of the model.
    pub fn scores(
        &self,
        ids: &[u32],
        edges: &[u32],
        which: &[Comparator],
        scratch: &mut PassiveScratch,
    ) -> Result<Vec<Vec<f32>>, ScoreError> {
        let (spec, n, hidden) = (&self.spec, ids.len() as u32, self.trunk.shape().hidden);
        let mut out = vec![vec![f32::NAN; edges.len()]; which.len()];
        let usable: Vec<usize> = (0..edges.len()).filter(|&e| edges[e] > 0 && edges[e] < n).collect();
        for of_segment in usable.chunk_by(|&a, &b| spec.segment(edges[a], n) == spec.segment(edges[b], n)) {
            let mut batch = Batch::default();
            batch.push(spec.full_pass(ids, spec.segment(edges[of_segment[0]], n)));
            let taps = [Tap::Layer(0), self.layer, Tap::Final, self.attention];
            // Attention over a whole segment is dear: it is read only where it is asked for.
            let taps = &taps[..if which.contains(&Comparator::AttentionIsolation) { 4 } else { 3 }];
            let mut states = self.trunk.forward(&batch, taps, &mut scratch.model)?.into_iter();
            let mut take = || states.next().unwrap_or_default();
            let (embeddings, layer, normed, shares) = (take(), take(), take(), take());
            let head = self.trunk.head().ok_or_else(|| ScoreError::Worker("the head is gone".into()))?;
            // Of the token of each row but the first, which nothing predicts.
            let log = head.log_probabilities(&normed[..normed.len() - hidden], &batch.ids[1..], &mut scratch.head)?;
            let view = View { log: &log, embeddings: &embeddings, layer: &layer, shares: &shares, hidden };
            for &edge in of_segment {
                let (row, m) = (spec.full_row(edges[edge], n), spec.window_at(edges[edge], n) as usize);
                for (which, out) in which.iter().zip(&mut out) {
                    out[edge] = view.score(*which, row, m, spec.window as usize, spec.skip as usize) as f32;
                }
            }
        }
        Ok(out)
    }
}

/// What a pass over a segment left, row by row.
struct View<'a> {
    /// Log-probability of the token of each row from the second on.
    log: &'a [f64],
    embeddings: &'a [f32],
    layer: &'a [f32],
    /// See [`Tap::Attention`].
    shares: &'a [f32],
    hidden: usize,
}

impl View<'_> {
    /// Of the edge before `row`, whose window has `m` tokens of at most `window`.
    fn score(&self, which: Comparator, row: usize, m: usize, window: usize, skip: usize) -> f64 {
        let surprisal = |from: usize, to: usize| {
            let (from, to) = (from.max(1), to.max(1));
            if from < to { -self.log[from - 1..to - 1].iter().sum::<f64>() / (to - from) as f64 } else { f64::NAN }
        };
        match which {
            Comparator::BoundarySurprisal => surprisal(row, row + 1),
            Comparator::WindowSurprisal => surprisal(row + skip + 1, (row + m).max(row + skip + 1)),
            Comparator::PplMinimum => {
                let here = surprisal(row.saturating_sub(window), row);
                let before = surprisal(row.saturating_sub(2 * window), row.saturating_sub(window));
                let after = surprisal(row, row + m);
                (after - here) + if before.is_nan() { 0.0 } else { before - here }
            }
            Comparator::AttentionIsolation => {
                let inside = (0..m).map(|q| f64::from(self.shares[(row + q) * window + q])).sum::<f64>();
                inside / m as f64 - 1.0
            }
            Comparator::ResidualJump => distance(self.layer, self.hidden, (row - 1, row), (row, row + 1)),
            Comparator::LocalHiddenDistance => distance(self.layer, self.hidden, (row.saturating_sub(window), row), (row, row + m)),
            Comparator::EmbeddingJump => {
                let (left, right) = (row.saturating_sub(EMBEDDING_TOKENS), row + m.min(EMBEDDING_TOKENS));
                distance(self.embeddings, self.hidden, (left, row), (row, right))
            }
            Comparator::Sentence | Comparator::Punctuation | Comparator::FixedGrid | Comparator::Random => f64::NAN,
        }
    }
}

/// 1 - cosine of the means of two runs of rows.
fn distance(states: &[f32], hidden: usize, left: (usize, usize), right: (usize, usize)) -> f64 {
    let mean = |(from, to): (usize, usize)| {
        let mut sum = vec![0.0_f64; hidden];
        for row in states[from * hidden..to * hidden].chunks_exact(hidden) {
            sum.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v));
        }
        // The cosine does not see the length.
        sum.into_iter().map(|v| v as f32).collect::<Vec<f32>>()
    };
    1.0 - ops::cosine(&mean(left), &mean(right))
}

/// The scores of edges by a comparator that reads the text alone; `None` for the others.
#[must_use]
pub fn surface(which: Comparator, text: &str, edges: &[&Edge], target: u32, seed: u64) -> Option<Vec<f32>> {
    let score: Box<dyn Fn(&Edge) -> f32> = match which {
        Comparator::Sentence => Box::new(|edge| f32::from(u8::from(edge.kind == EdgeKind::Sentence))),
        Comparator::Punctuation => Box::new(|edge| punctuation(text.get(..edge.byte.0 as usize).unwrap_or_default())),
        Comparator::FixedGrid => Box::new(move |edge| {
            let off = edge.token.0 % target;
            -(off.min(target - off) as f32)
        }),
        Comparator::Random => {
            let key = blake3::hash(text.as_bytes());
            Box::new(move |edge| {
                let mut hasher = blake3::Hasher::new_keyed(key.as_bytes());
                let hash = hasher.update(&seed.to_le_bytes()).update(&edge.token.0.to_le_bytes()).finalize();
                // 24 bits: a float holds them all.
                let [a, b, c, ..] = *hash.as_bytes();
                u32::from_le_bytes([a, b, c, 0]) as f32 / (1 << 24) as f32
            })
        }
        _ => return None,
    };
    Some(edges.iter().map(|edge| score(edge)).collect())
}

/// See [`Comparator::Punctuation`].
fn punctuation(before: &str) -> f32 {
    let line = before.trim_end_matches(|c: char| c.is_whitespace());
    match before[line.len()..].matches('\n').count() {
        0 => {}
        1 => return 4.0,
        _ => return 5.0,
    }
    let closes = |c: char| matches!(c, '"' | '\'' | '”' | '’' | '»' | ')' | ']' | '}' | '」' | '』' | '）');
    match line.trim_end_matches(closes).chars().next_back() {
        Some('.' | '?' | '!' | '…' | '。' | '？' | '！') => 3.0,
        Some(';' | ':' | '；' | '：') => 2.0,
        Some(',' | '，' | '、') => 1.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{ByteIdx, TokenIdx};

    fn edge(token: u32, byte: u64, kind: EdgeKind) -> Edge {
        Edge { token: TokenIdx(token), byte: ByteIdx(byte), kind }
    }

    #[test]
    fn punctuation_is_what_stands_before() {
        let cases = [("a\n\n", 5.0), ("a.\n  ", 4.0), ("He said \"no.\" ", 3.0), ("(so:) ", 2.0), ("a, ", 1.0), ("a b ", 0.0), ("", 0.0)];
        for (text, score) in cases {
            assert_eq!(punctuation(text), score, "{text:?}");
        }
    }

    #[test]
    fn surface_scores_need_no_model() {
        let text = "One. Two, three";
        let edges = [edge(90, 5, EdgeKind::Sentence), edge(200, 10, EdgeKind::Word)];
        let of = |which, seed| surface(which, text, &edges.iter().collect::<Vec<_>>(), 192, seed).unwrap();
        assert_eq!(of(Comparator::Sentence, 0), [1.0, 0.0]);
        assert_eq!(of(Comparator::Punctuation, 0), [3.0, 1.0]);
        assert_eq!(of(Comparator::FixedGrid, 0), [-90.0, -8.0]);
        assert_eq!(of(Comparator::Random, 1), of(Comparator::Random, 1));
        assert_ne!(of(Comparator::Random, 1), of(Comparator::Random, 2));
        assert!(of(Comparator::Random, 1).iter().all(|v| (0.0..1.0).contains(v)));
        assert_eq!(surface(Comparator::ResidualJump, text, &[], 192, 0), None);
    }

    #[test]
    fn a_view_by_hand() {
        // Five rows of two floats, the log-probabilities of the last four tokens, attention shares of two keys.
        let states = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0];
        let shares = [1.0, 1.0, 0.5, 1.0, 0.6, 0.7, 0.2, 0.9, 0.3, 0.4];
        let view = View { log: &[-1.0, -2.0, -5.0, -3.0], embeddings: &states, layer: &states, shares: &shares, hidden: 2 };
        let score = |which| view.score(which, 2, 2, 2, 0);
        assert_eq!(score(Comparator::BoundarySurprisal), 2.0);
        // With s = 0 the targets are t = 1: the token of row 3.
        assert_eq!(score(Comparator::WindowSurprisal), 5.0);
        // Here the token of row 1 alone (the first has none), after those of rows 2 and 3, nothing before.
        assert_eq!(score(Comparator::PplMinimum), 3.5 - 1.0);
        // Row 2 sees itself with 0.6, row 3 itself and row 2 with 0.9.
        assert!((score(Comparator::AttentionIsolation) - (0.75 - 1.0)).abs() < 1e-7);
        assert!((score(Comparator::ResidualJump) - 1.0).abs() < 1e-7);
        assert!((score(Comparator::LocalHiddenDistance) - 1.0).abs() < 1e-7);
        // All five rows: (1, 0) twice against (0, 1) twice and (1, 1).
        let both = view.score(Comparator::EmbeddingJump, 2, 3, 3, 0);
        assert!((both - (1.0 - 1.0 / 10.0_f64.sqrt())).abs() < 1e-7, "{both}");
    }
}
