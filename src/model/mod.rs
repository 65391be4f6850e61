//! Models: a causal trunk per architecture, made of [`ops`], and where weights come from.
//!
//! Owns checkpoints (GGUF, hub directories), their identity (hashes that a warm run needs without loading anything) and the forward
//! pass. Promises: the bits of a sequence do not depend on what else is in the batch. Knows nothing of documents.

mod config;
mod gemma4;
mod gpt2;
mod gpt_neox;
mod llama;
pub mod ops;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod registry;
mod weights;

use ops::{AttentionScratch, Buffer, DeltaScratch, FeedForwardScratch, Head};
pub(crate) use registry::user_cache;
pub use registry::{BUILT_IN, BuiltIn, Identity, ModelPath, fetch, identity, load_tokenizer, load_trunk, models_dir, resolve};

/// What can go wrong with a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A checkpoint is damaged or lacks something.
    #[error("{path}: {reason}")]
    Checkpoint {
        /// The file or folder.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No such model.
    #[error("model {name:?} not found: {reason}")]
    NotFound {
        /// The name as given.
        name: String,
        /// What was looked for, and what to do.
        reason: String,
    },
    /// A fetch failed.
    #[error("fetching {name} failed: {reason}")]
    Fetch {
        /// The model.
        name: String,
        /// What was tried, what happened, and how to place the file by hand.
        reason: String,
    },
    /// Weights do not fit the configuration.
    #[error("weights do not fit: {0}")]
    Shape(String),
    /// A token id outside the embedding.
    #[error("token id {id} is outside the model's vocabulary of {vocab}: the tokenizer belongs to another model")]
    TokenId {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// A position outside the model's context.
    #[error("position {position} is outside the {context} positions of the model")]
    Position {
        /// The position.
        position: u32,
        /// Positions there are.
        context: usize,
    },
    /// The tokenizer is unusable.
    #[error(transparent)]
    Text(#[from] crate::text::TextError),
}

/// A place in the network whose states can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tap {
    /// The raw output of the k-th block; 0 is the embeddings.
    Layer(usize),
    /// The last block's output after the final norm.
    Final,
}

/// Sequences packed one after the other, each attending only within itself.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// Token ids of all sequences.
    pub ids: Vec<u32>,
    /// Position of each token.
    pub positions: Vec<u32>,
    /// Where each sequence ends; ascending.
    pub ends: Vec<usize>,
}

impl Batch {
    /// Appends a sequence.
    pub fn push(&mut self, tokens: impl IntoIterator<Item = (u32, u32)>) {
        for (id, position) in tokens {
            self.ids.push(id);
            self.positions.push(position);
        }
        self.ends.push(self.ids.len());
    }

    /// Refuses a position that a model of `positions` does not have.
    fn check_positions(&self, positions: usize) -> Result<(), ModelError> {
        match self.positions.iter().find(|&&p| p as usize >= positions) {
            Some(&position) => Err(ModelError::Position { position, context: positions }),
            None => Ok(()),
        }
    }

    /// Token ranges of the sequences.
    pub fn sequences(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.ends.iter().scan(0, |start, &end| Some(std::mem::replace(start, end)..end))
    }
}

/// What a caller must know of a trunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Floats of a state.
    pub hidden: usize,
    /// Blocks, L.
    pub layers: usize,
    /// Positions the model was made for.
    pub context: usize,
    /// Rows of the embedding.
    pub vocab: usize,
}

/// Buffers of a forward pass, one per thread.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(crate) x: Buffer,
    pub(crate) qkv: Buffer,
    pub(crate) attended: Buffer,
    pub(crate) normed: Buffer,
    pub(crate) feed_forward: FeedForwardScratch,
    /// Embeddings, for layers that come back to them.
    pub(crate) start: Buffer,
    /// Keys and values that later layers use again, of sliding and of full ones.
    pub(crate) shared: [Buffer; 2],
    pub(crate) gates: Buffer,
    pub(crate) steps: Buffer,
    pub(crate) delta: DeltaScratch,
    pub(crate) attention: AttentionScratch,
}

/// How much of a checkpoint is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Blocks, at most.
    pub depth: usize,
    /// Positions beyond the context that can be used: a reset prefix may shift a pass up.
    pub extra: usize,
    /// Whether the output head comes too.
    pub head: bool,
}

/// A causal language model: tokens in, hidden states out, and a head that makes logits of them. Holds no state between calls.
pub trait Trunk: Send + Sync {
    /// Sizes.
    fn shape(&self) -> Shape;

    /// Runs the batch and returns, for each tap, the states of all its tokens (`tokens x hidden`). Stops after the last layer tapped.
    ///
    /// # Errors
    /// [`ModelError::TokenId`] or [`ModelError::Position`] for a token or position the model does not have.
    fn forward(&self, batch: &Batch, taps: &[Tap], scratch: &mut Scratch) -> Result<Vec<Vec<f32>>, ModelError>;

    /// The output head, which reads the states of [`Tap::Final`], if it was loaded.
    fn head(&self) -> Option<&Head>;
}

/// Runs blocks on the embeddings in `scratch.x` and collects what is tapped.
fn run_blocks(
    batch: &Batch,
    taps: &[Tap],
    loaded: usize,
    hidden: usize,
    scratch: &mut Scratch,
    mut block: impl FnMut(usize, &mut Scratch),
    norm: impl Fn(&[f32], &mut [f32]),
) -> Vec<Vec<f32>> {
    let depth = |tap: &Tap| match tap {
        Tap::Layer(layer) => (*layer).min(loaded),
        Tap::Final => loaded,
    };
    let last = taps.iter().map(depth).max().unwrap_or(0);
    let mut states = vec![Vec::new(); taps.len()];
    for layer in 0..=last {
        if layer > 0 {
            block(layer - 1, scratch);
        }
        let x = scratch.x.get(batch.ids.len() * hidden);
        for (tap, out) in taps.iter().zip(&mut states).filter(|(tap, _)| depth(tap) == layer) {
            match tap {
                Tap::Layer(_) => *out = x.to_vec(),
                Tap::Final => {
                    *out = vec![0.0; x.len()];
                    norm(x, out);
                }
            }
        }
    }
    states
}
