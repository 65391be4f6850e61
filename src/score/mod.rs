//! Scoring: the reset pass, its comparison with the full pass, and the engine that packs windows of many documents into batches.
//!
//! Owns the readouts of the reset pass (RR, LR, KL) and their curves, and the embedding boundary. Promises: the curve of an edge has the same bits whatever
//! batch, thread or neighbour it was computed with. Knows nothing of files or the cache.

mod boundary;
mod curve;
mod engine;
mod layers;
mod passive;
mod prompted;
mod stages;

pub use boundary::{EMBED_TOKENS, EmbeddingBoundary, sides};
pub use curve::{Curve, Curves, Damage, Knots, kept_positions, score_at};
pub use engine::{Document, EdgeCurves, Engine, EngineOptions, EngineStats};
pub use layers::rr_by_layer;
pub use passive::{Comparator, Passive, PassiveScratch, surface};
pub use prompted::{OMITTED, PROMPT_REVISION, prompted};
pub use stages::{Stage, reach};

use crate::model::ops::Precision;
use crate::model::{ModelError, Tap};

/// Revision of the kernels and of the order of their operations: part of the score key, raised when a change of code changes bits.
#[must_use]
pub fn kernel_revision(precision: Precision) -> u32 {
    if precision == Precision::F32 { 2 } else { 3 }
}

/// What can go wrong while scoring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScoreError {
    /// The model refused the input.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A score came out infinite or NaN.
    #[error("the score of edge {edge} is not a finite number: the model's states overflow on this document")]
    NotFinite {
        /// Tokens on the left of the edge.
        edge: u32,
    },
    /// The settings do not fit each other or the model.
    #[error("{0}")]
    Settings(String),
    /// A worker thread died: a bug.
    #[error("a scoring thread failed: {0}")]
    Worker(String),
}

/// What an edge is scored by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Readout {
    /// Right Reset: cosines of full and reset states (paper equation 1).
    Rr,
    /// Observed-token likelihood ratio: how much less likely the reset pass finds the tokens that come (paper equation 2).
    Lr,
    /// KL divergence of the reset pass's predictions from those of the full pass.
    Kl,
    /// Embedding boundary: distance of the texts on both sides to a text encoder. Needs no reset pass, and has one value in place of a curve.
    Embed,
}

impl Readout {
    /// Its name in pipelines, columns and cache keys.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rr => "rr",
            Self::Lr => "lr",
            Self::Kl => "kl",
            Self::Embed => "embed",
        }
    }

    /// Terms left out of a score at the start of the window: `s` positions for RR, `s + 1` tokens for LR and KL, which speak of the
    /// token after a position, none for the embedding boundary.
    #[must_use]
    pub fn first(self, skip: u32) -> u32 {
        match self {
            Self::Embed => 0,
            Self::Rr => skip,
            Self::Lr | Self::Kl => skip + 1,
        }
    }
}

/// Which readouts a reset pass gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Readouts {
    /// Where RR reads states; none is no RR.
    pub rr: Option<Tap>,
    /// Whether LR is read.
    pub lr: bool,
    /// Whether KL is read.
    pub kl: bool,
}

impl Readouts {
    /// RR alone.
    #[must_use]
    pub fn rr(tap: Tap) -> Self {
        Self { rr: Some(tap), lr: false, kl: false }
    }

    /// Whether a readout is among them.
    #[must_use]
    pub fn has(&self, readout: Readout) -> bool {
        match readout {
            Readout::Rr => self.rr.is_some(),
            Readout::Lr => self.lr,
            Readout::Kl => self.kl,
            Readout::Embed => false,
        }
    }

    /// Whether the output head is needed.
    #[must_use]
    pub fn need_head(&self) -> bool {
        self.lr || self.kl
    }

    /// Blocks that must be run at most.
    #[must_use]
    pub fn depth(&self) -> usize {
        match self.rr {
            Some(Tap::Layer(layer)) if !self.need_head() => layer,
            _ => usize::MAX,
        }
    }
}

/// How positions of a reset pass are numbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Positions {
    /// As in the document.
    Original,
    /// From 0, prefix included.
    Reindexed,
}

/// What stands before the window of a reset pass.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Prefix {
    /// Fixed tokens; none is the paper's default.
    Tokens(Vec<u32>),
    /// The `p` tokens before the edge are kept.
    Local(u32),
}

impl Prefix {
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Local(p) => *p as usize,
        }
    }
}

/// Everything that decides a score, besides the model and the document.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreSpec {
    /// Stages before the last; none is one pass over the whole window.
    pub stages: Vec<Stage>,
    /// Tokens of the reset window, W: of the last stage.
    pub window: u32,
    /// Positions skipped at the start of the window, s.
    pub skip: u32,
    /// What is read.
    pub readouts: Readouts,
    /// How the reset pass is numbered.
    pub positions: Positions,
    /// What stands before the window.
    pub prefix: Prefix,
    /// A token put before the full pass, for models that need it.
    pub bos: Option<u32>,
    /// Tokens of one full pass, C.
    pub context: u32,
}

impl ScoreSpec {
    /// Checks that the settings fit each other.
    ///
    /// # Errors
    /// [`ScoreError::Settings`] that names the settings.
    pub fn validate(&self) -> Result<(), ScoreError> {
        let fail = |text: String| Err(ScoreError::Settings(text));
        if self.readouts == Readouts::default() {
            return fail("score.readouts is empty".into());
        }
        if let Some(readout) = self.read().find(|r| self.window <= r.first(self.skip)) {
            let readout = readout.as_str();
            return fail(format!("score.window = {} leaves nothing of {readout} after score.skip = {}", self.window, self.skip));
        }
        self.validate_stages()?;
        let needed = self.window as usize + self.prefix.len();
        if needed > (self.room() - self.stride()) as usize {
            return fail(format!(
                "score.window and the reset prefix take {needed} tokens, more than the {} that a context of {} leaves; \
                 lower score.window or raise score.context",
                self.room() - self.stride(),
                self.context
            ));
        }
        if self.prefix == Prefix::Local(0) {
            return fail("score.reset_prefix = \"local:0\" keeps nothing; use \"none\"".into());
        }
        Ok(())
    }

    fn validate_stages(&self) -> Result<(), ScoreError> {
        let fail = |text: String| Err(ScoreError::Settings(format!("score.stages: {text}")));
        if self.stages.is_empty() {
            return Ok(());
        }
        if self.readouts != (Readouts { lr: true, ..Readouts::default() }) {
            return fail(
                "stages rank edges by lr and read nothing else of a reset pass; take score.readouts = [\"lr\"], or score.window".into(),
            );
        }
        let horizons: Vec<u32> = self.stages.iter().map(|s| s.horizon).chain([self.window]).collect();
        if horizons.iter().any(|h| *h == 0 || !h.is_multiple_of(8)) || horizons.windows(2).any(|h| h[0] >= h[1]) {
            return fail(format!("windows must be ascending multiples of 8, got {horizons:?}"));
        }
        let shares: Vec<f64> = self.stages.iter().map(|s| s.keep).collect();
        if shares.iter().any(|s| !(*s > 0.0 && *s < 1.0)) || shares.windows(2).any(|s| s[0] < s[1]) {
            return fail(format!("shares of all candidates must lie between 0 and 1 and not rise, got {shares:?}"));
        }
        if self.stages[0].horizon <= Readout::Lr.first(self.skip) {
            return fail(format!("the first window leaves nothing of lr after score.skip = {}", self.skip));
        }
        Ok(())
    }

    /// Tokens of the window in a stage.
    fn horizon(&self, stage: usize) -> u32 {
        self.stages.get(stage).map_or(self.window, |s| s.horizon)
    }

    /// Document tokens of one segment.
    fn room(&self) -> u32 {
        self.context - u32::from(self.bos.is_some())
    }

    /// Distance between segments, S.
    fn stride(&self) -> u32 {
        self.context / 2
    }

    /// Tokens of the window of edge `b` in a document of `n` tokens: m = min(W, n - b).
    #[must_use]
    pub fn window_at(&self, b: u32, n: u32) -> u32 {
        self.window.min(n - b)
    }

    /// The readouts there are.
    fn read(&self) -> impl Iterator<Item = Readout> + '_ {
        [Readout::Rr, Readout::Lr, Readout::Kl].into_iter().filter(|r| self.readouts.has(*r))
    }

    /// Whether edge `b` gets a score of a readout: its window is longer than what is skipped, and the prefix is really removed.
    #[must_use]
    pub fn gives(&self, readout: Readout, b: u32, n: u32) -> bool {
        let removes = if let Prefix::Local(p) = self.prefix { b > p } else { true };
        self.readouts.has(readout) && b < n && self.window_at(b, n) > readout.first(self.skip) && removes
    }

    /// Whether edge `b` gets a score of any readout.
    #[must_use]
    pub fn scores(&self, b: u32, n: u32) -> bool {
        self.read().any(|readout| self.gives(readout, b, n))
    }

    /// The segment that edge `b` is read from: i = max(0, ceil((b + m - C) / S)).
    fn segment(&self, b: u32, n: u32) -> u32 {
        (b + self.window_at(b, n)).saturating_sub(self.room()).div_ceil(self.stride())
    }

    /// Tokens and positions of segment `i`.
    fn full_pass<'a>(&self, ids: &'a [u32], segment: u32) -> impl Iterator<Item = (u32, u32)> + use<'a> {
        let start = (segment * self.stride()) as usize;
        let end = ids.len().min(start + self.room() as usize);
        self.bos.into_iter().chain(ids[start..end].iter().copied()).zip(0..)
    }

    /// Tokens and positions of the reset pass at `b`, and how many of them stand before the window.
    fn reset_pass<'a>(&'a self, ids: &'a [u32], b: u32) -> (impl Iterator<Item = (u32, u32)> + use<'a>, usize) {
        let n = ids.len() as u32;
        let m = self.window_at(b, n);
        let prefix: &[u32] = match &self.prefix {
            Prefix::Tokens(tokens) => tokens,
            Prefix::Local(p) => &ids[(b - p) as usize..b as usize],
        };
        let p = prefix.len() as u32;
        let first = match self.positions {
            Positions::Reindexed => 0,
            Positions::Original => (b - self.segment(b, n) * self.stride() + u32::from(self.bos.is_some())).saturating_sub(p),
        };
        let window = &ids[b as usize..(b + m) as usize];
        (prefix.iter().chain(window).copied().zip(first..), prefix.len())
    }

    /// Row of token `b` among the states of its segment.
    fn full_row(&self, b: u32, n: u32) -> usize {
        (b - self.segment(b, n) * self.stride() + u32::from(self.bos.is_some())) as usize
    }
}
