//! Models: a causal trunk per architecture, made of [`ops`], and where weights come from.
//!
//! Owns checkpoints (GGUF, hub directories), their identity (hashes that a warm run needs without loading anything) and the forward
//! pass. Promises: the bits of a sequence do not depend on what else is in the batch. Knows nothing of documents.

mod chat;
mod config;
mod encoder;
mod gemma4;
mod gpt2;
mod gpt_neox;
mod hub;
mod llama;
pub mod ops;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod registry;
mod weights;

use std::sync::Arc;

pub use chat::Chat;
pub use encoder::{Encoder, EncoderIdentity, EncoderScratch, encoder_identity};
pub use hub::FetchProgress;
pub(crate) use hub::HubName;
use ops::{AttentionScratch, AttentionShape, Buffer, DeltaScratch, Embedding, FeedForwardScratch, Head, attention};
pub(crate) use registry::user_cache;
pub use registry::{BUILT_IN, BuiltIn, Identity, ModelPath, Origin, fetch, identity, load_tokenizer, load_trunk, models_dir, resolve};
use weights::Weights;

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
    /// An accelerator is missing or failed.
    #[error("the accelerator: {0}; check model.device, or use \"cpu\"")]
    Device(String),
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
    /// What the k-th block attends to: for each token, `keys` numbers, the d-th (from 0) being the share of its attention, averaged over heads, that goes to
    /// itself and the d tokens before it. Only of sequences that begin in the batch.
    Attention {
        /// The block, from 1.
        block: usize,
        /// Numbers a token.
        keys: usize,
    },
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

/// What the tokens of a sequence leave behind for those that come after them: keys and values of every block, or its convolution's and running state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Past(Vec<Vec<f32>>);

impl Past {
    /// What a block left; empty before the first token.
    fn block(&mut self, block: usize) -> &mut Vec<f32> {
        if self.0.len() <= block {
            self.0.resize(block + 1, Vec::new());
        }
        &mut self.0[block]
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
    /// What attention is read where.
    pub(crate) probe: Option<Probe>,
    /// By sequence; empty where nothing is kept.
    pub(crate) past: Vec<Option<Past>>,
}

/// Reads the attention of the block that runs.
#[derive(Debug)]
pub(crate) struct Probe {
    keys: usize,
    /// Rows of `keys` numbers; empty until the block has run.
    shares: Vec<f32>,
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
    /// Where products run.
    pub device: ops::Device,
    /// What they are computed with.
    pub precision: ops::Precision,
}

/// A causal language model: tokens in, hidden states out, and a head that makes logits of them. Holds no state between calls.
pub trait Trunk: Send + Sync {
    /// Sizes.
    fn shape(&self) -> Shape;

    /// Floats that a sequence of so many tokens leaves behind.
    fn past_floats(&self, tokens: usize) -> usize;

    /// Runs the batch, as [`Self::resume`] does, from nothing, and keeps nothing.
    ///
    /// # Errors
    /// As [`Self::resume`].
    fn forward(&self, batch: &Batch, taps: &[Tap], scratch: &mut Scratch) -> Result<Vec<Vec<f32>>, ModelError> {
        self.resume(batch, &mut [], taps, scratch)
    }

    /// Runs the batch, whose sequences go on after what `past` holds of each (nothing yet, or what an earlier call left there) and leave there what comes
    /// next; where it has no entry, or none, a sequence begins and nothing is kept. The states have the bits of a run over the whole sequence. Returns, for each tap, the states of all its tokens (`tokens x hidden`, `tokens x keys` for attention). Stops after the last layer tapped.
    ///
    /// # Errors
    /// [`ModelError::TokenId`] or [`ModelError::Position`] for a token or position the model does not have, [`ModelError::Shape`] for the attention of a block
    /// that has none.
    fn resume(&self, batch: &Batch, past: &mut [Option<Past>], taps: &[Tap], scratch: &mut Scratch) -> Result<Vec<Vec<f32>>, ModelError>;

    /// The output head, which reads the states of [`Tap::Final`], if it was loaded.
    fn head(&self) -> Option<&Head>;
}

/// The embeddings `name` (`vocab x hidden`) and, if it is asked for, the output head: the tensor `untied`, or the embeddings where there is none.
fn load_vocabulary(
    weights: &Weights,
    load: Load,
    (name, untied): (&str, Option<&str>),
    shape: [usize; 2],
    cap: Option<f32>,
) -> Result<(Embedding, Option<Arc<Head>>), ModelError> {
    let hidden = shape[1];
    let table = weights.get_numbers(name, &shape)?;
    match (load.head, untied) {
        (false, _) => Ok((Embedding::new(hidden, table), None)),
        (true, None) => {
            let head = Arc::new(Head::pack(hidden, &table, cap)?);
            Ok((Embedding::tied(hidden, table, &head), Some(head)))
        }
        (true, Some(name)) => {
            let head = Head::pack(hidden, &weights.get_numbers(name, &shape)?, cap)?;
            Ok((Embedding::new(hidden, table), Some(Arc::new(head))))
        }
    }
}

/// Attends within each sequence of a batch: rows of queries, keys and values in, rows of heads out. Keys and values of sequences that go on are added to
/// what they left in this block.
fn attend(
    shape: AttentionShape,
    block: usize,
    batch: &Batch,
    qkv: &[f32],
    out: &mut [f32],
    scratch: &mut AttentionScratch,
    (probe, past): (&mut Option<Probe>, &mut [Option<Past>]),
) {
    if let Some(probe) = probe {
        probe.shares =
            batch.sequences().flat_map(|span| shares(shape, &qkv[span.start * shape.qkv()..span.end * shape.qkv()], probe.keys)).collect();
    }
    let (inputs, outputs, own) = (shape.qkv(), shape.heads * shape.head_dim, shape.qkv() - shape.kv());
    for (i, span) in batch.sequences().enumerate() {
        let out = &mut out[span.start * outputs..span.end * outputs];
        let qkv = &qkv[span.start * inputs..span.end * inputs];
        match past.get_mut(i).and_then(Option::as_mut) {
            None => attention(shape, &[], qkv, out, scratch),
            Some(past) => {
                let kept = past.block(block);
                attention(shape, kept, qkv, out, scratch);
                kept.reserve_exact(span.len() * shape.kv());
                qkv.chunks_exact(inputs).for_each(|row| kept.extend_from_slice(&row[own..]));
            }
        }
    }
}

/// For each token of a sequence the `keys` numbers of [`Tap::Attention`].
fn shares(shape: AttentionShape, qkv: &[f32], keys: usize) -> Vec<f32> {
    let AttentionShape { heads, kv_heads, head_dim, scale, window, .. } = shape;
    let rows: Vec<&[f32]> = qkv.chunks_exact(shape.qkv()).collect();
    let mut out = vec![0.0; rows.len() * keys];
    let mut weights = Vec::new();
    for (j, (row, out)) in rows.iter().zip(out.chunks_exact_mut(keys)).enumerate() {
        let first = window.map_or(0, |window| (j + 1).saturating_sub(window));
        for (head, query) in row[..heads * head_dim].chunks_exact(head_dim).enumerate() {
            let key_at = (heads + head / (heads / kv_heads)) * head_dim;
            let dot = |key: &&[f32]| scale * query.iter().zip(&key[key_at..key_at + head_dim]).map(|(q, k)| q * k).sum::<f32>();
            weights.clear();
            // From the token itself backwards.
            weights.extend(rows[first..=j].iter().rev().map(dot));
            let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            weights.iter_mut().for_each(|w| *w = (*w - max).exp());
            let sum = weights.iter().sum::<f32>() * heads as f32;
            let mut so_far = 0.0;
            for (d, out) in out.iter_mut().enumerate() {
                so_far += weights.get(d).copied().unwrap_or(0.0);
                *out += so_far / sum;
            }
        }
    }
    out
}

/// What an architecture brings; the trunk around it is the same for all.
trait Architecture: Send + Sync {
    /// Sizes.
    fn shape(&self) -> Shape;

    /// Positions that can be used.
    fn positions(&self) -> usize;

    /// Floats that a sequence of so many tokens leaves behind in the blocks that were loaded.
    fn past_floats(&self, tokens: usize) -> usize;

    /// Blocks that were loaded.
    fn blocks(&self) -> usize;

    /// Token embeddings.
    fn embedding(&self) -> &Embedding;

    /// Puts what the first block reads into `scratch.x`.
    fn embed(&self, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        self.embedding().forward(&batch.ids, scratch.x.get(batch.ids.len() * self.shape().hidden))
    }

    /// Runs a block on `scratch.x`.
    fn block(&self, layer: usize, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError>;

    /// The final norm.
    fn norm(&self, x: &[f32], out: &mut [f32]);

    /// The output head, if it was loaded.
    fn head(&self) -> Option<&Head>;
}

impl<A: Architecture> Trunk for A {
    fn shape(&self) -> Shape {
        Architecture::shape(self)
    }

    fn past_floats(&self, tokens: usize) -> usize {
        Architecture::past_floats(self, tokens)
    }

    fn resume(&self, batch: &Batch, past: &mut [Option<Past>], taps: &[Tap], scratch: &mut Scratch) -> Result<Vec<Vec<f32>>, ModelError> {
        let (positions, hidden) = (self.positions(), Architecture::shape(self).hidden);
        if let Some(&position) = batch.positions.iter().find(|&&p| p as usize >= positions) {
            return Err(ModelError::Position { position, context: positions });
        }
        let depth = |tap: &Tap| match tap {
            Tap::Layer(layer) | Tap::Attention { block: layer, .. } => (*layer).min(self.blocks()),
            Tap::Final => self.blocks(),
        };
        let last = taps.iter().map(depth).max().unwrap_or(0);
        let mut states = vec![Vec::new(); taps.len()];
        self.embed(batch, scratch)?;
        scratch.past.clear();
        scratch.past.extend(past.iter_mut().map(Option::take));
        for layer in 0..=last {
            let attention = taps.iter().find_map(|tap| match tap {
                Tap::Attention { keys, .. } if depth(tap) == layer => Some(*keys),
                _ => None,
            });
            scratch.probe = attention.map(|keys| Probe { keys, shares: Vec::new() });
            if layer > 0 {
                self.block(layer - 1, batch, scratch)?;
            }
            let shares = scratch.probe.take().map_or(Vec::new(), |probe| probe.shares);
            let x = scratch.x.get(batch.ids.len() * hidden);
            for (tap, out) in taps.iter().zip(&mut states).filter(|(tap, _)| depth(tap) == layer) {
                match tap {
                    Tap::Layer(_) => *out = x.to_vec(),
                    Tap::Final => {
                        *out = vec![0.0; x.len()];
                        self.norm(x, out);
                    }
                    Tap::Attention { .. } if shares.is_empty() => {
                        return Err(ModelError::Shape(format!("block {layer} has no attention to read; choose another layer")));
                    }
                    Tap::Attention { .. } => out.clone_from(&shares),
                }
            }
        }
        past.iter_mut().zip(scratch.past.drain(..)).for_each(|(past, now)| *past = now);
        Ok(states)
    }

    fn head(&self) -> Option<&Head> {
        Architecture::head(self)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The path of accelerators, on candle's own processor.
    #[test]
    fn every_architecture_runs_on_a_device_as_it_does_here_and_its_rows_depend_on_nothing_beside_them() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/arch");
        for name in ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma4", "qwen3_5"] {
            let load = Load { depth: usize::MAX, extra: 0, head: true, device: ops::Device::Cpu, precision: ops::Precision::F32 };
            let here = load_trunk(&folder.join(name), load).unwrap();
            let there = registry::load_trunk_on(&folder.join(name), load, Some(candle_core::Device::Cpu)).unwrap();
            let mut batch = Batch::default();
            batch.push((0..40).map(|i| (3 + i * 7 % 150, i)));
            batch.push((0..9).map(|i| (5 + i * 11 % 150, i + 20)));
            let run = |trunk: &dyn Trunk, batch: &Batch| trunk.forward(batch, &[Tap::Final], &mut Scratch::default()).unwrap().remove(0);
            let (expected, found) = (run(here.as_ref(), &batch), run(there.as_ref(), &batch));
            let size = expected.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            assert!(expected.iter().zip(&found).all(|(e, f)| (e - f).abs() < 1e-4 * size), "{name}");
            let mut alone = Batch::default();
            alone.push((0..9).map(|i| (5 + i * 11 % 150, i + 20)));
            let hidden = here.shape().hidden;
            assert_eq!(run(there.as_ref(), &alone), found[40 * hidden..], "{name}");
            let log = |trunk: &dyn Trunk| {
                trunk.head().unwrap().log_probabilities(&expected[..2 * hidden], &[4, 9], &mut ops::HeadScratch::default()).unwrap()
            };
            assert!(log(here.as_ref()).iter().zip(log(there.as_ref())).all(|(a, b)| (a - b).abs() < 1e-4), "{name}");
        }
    }
}
