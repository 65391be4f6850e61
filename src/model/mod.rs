//! Models: a causal trunk per architecture, made of [`ops`], and where weights come from.
//!
//! Owns checkpoints (GGUF, hub directories), their identity (hashes that a warm run needs without loading anything) and the forward
//! pass. Promises: the bits of a sequence do not depend on what else is in the batch. Knows nothing of documents.

mod llama;
pub mod ops;
mod registry;
mod weights;

use ops::{AttentionScratch, Buffer, FeedForwardScratch};
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
    pub(crate) attention: AttentionScratch,
}

/// A causal language model without its head: tokens in, hidden states out. Holds no state between calls.
pub trait Trunk: Send + Sync {
    /// Sizes.
    fn shape(&self) -> Shape;

    /// Runs the batch and returns, for each tap, the states of all its tokens (`tokens x hidden`). Stops after the last layer tapped.
    ///
    /// # Errors
    /// [`ModelError::TokenId`] or [`ModelError::Position`] for a token or position the model does not have.
    fn forward(&self, batch: &Batch, taps: &[Tap], scratch: &mut Scratch) -> Result<Vec<Vec<f32>>, ModelError>;
}
