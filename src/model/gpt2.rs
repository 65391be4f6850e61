//! GPT-2: learned positions, layer norm, full attention with biases, feed-forward with a tanh GELU.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::config::{Json, Metadata};
use super::ops::{Activation, AttentionShape, Embedding, FeedForward, Head, LayerNorm, Linear, Numbers, Output, Precision, ROW_TILE};
use super::weights::Weights;
use super::{Architecture, Batch, Load, ModelError, Scratch, Shape, attend, load_vocabulary};

/// Sizes and constants of a GPT-2 checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Gpt2Config {
    pub(super) hidden: usize,
    pub(super) feed_forward: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) vocab: usize,
    pub(super) context: usize,
    pub(super) eps: f32,
    pub(super) activation: Activation,
    /// Whether scores are divided by the root of the head size, and whether by the layer's number too.
    pub(super) scaled: [bool; 2],
    pub(super) tied: bool,
}

impl Gpt2Config {
    pub(super) fn from_hub(json: &Json<'_>) -> Result<Self, ModelError> {
        let hidden = json.need("n_embd")?;
        let config = Self {
            hidden,
            feed_forward: json.get("n_inner")?.unwrap_or(4 * hidden),
            layers: json.need("n_layer")?,
            heads: json.need("n_head")?,
            vocab: json.need("vocab_size")?,
            context: json.get("n_positions")?.unwrap_or(1024),
            eps: json.get("layer_norm_epsilon")?.unwrap_or(1e-5),
            activation: json.activation("activation_function", Activation::GeluTanh)?,
            scaled: [json.get("scale_attn_weights")?.unwrap_or(true), json.get("scale_attn_by_inverse_layer_idx")?.unwrap_or(false)],
            tied: json.tied(true)?,
        };
        config.check().map_err(|reason| json.fail(reason))?;
        Ok(config)
    }

    pub(super) fn from_gguf(meta: &Metadata<'_>) -> Result<Self, ModelError> {
        let hidden = meta.need("embedding_length")?;
        let config = Self {
            hidden,
            feed_forward: meta.number("feed_forward_length").unwrap_or(4 * hidden),
            layers: meta.need("block_count")?,
            heads: meta.need("attention.head_count")?,
            vocab: meta.vocab()?,
            context: meta.need("context_length")?,
            eps: meta.float("attention.layer_norm_epsilon").unwrap_or(1e-5),
            activation: Activation::GeluTanh,
            scaled: [true, false],
            tied: !meta.has_tensor("output.weight"),
        };
        config.check().map_err(|reason| meta.fail(reason))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let sizes = [self.hidden, self.feed_forward, self.layers, self.heads, self.vocab, self.context];
        if sizes.contains(&0) || !self.hidden.is_multiple_of(self.heads) {
            return Err(format!("its sizes fit no gpt2: {self:?}"));
        }
        Ok(())
    }
}

struct Block {
    attention_norm: LayerNorm,
    qkv: Linear,
    output: Linear,
    feed_forward_norm: LayerNorm,
    feed_forward: FeedForward,
}

/// A loaded GPT-2 trunk.
pub(super) struct Gpt2 {
    config: Gpt2Config,
    embedding: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Option<Arc<Head>>,
    precision: Precision,
}

impl Gpt2 {
    pub(super) fn load(config: Gpt2Config, weights: &Weights, load: Load) -> Result<Self, ModelError> {
        let Gpt2Config { hidden, feed_forward, vocab, context, eps, .. } = config;
        let names = ("wte.weight", (!config.tied).then_some("lm_head.weight"));
        let (embedding, head) = load_vocabulary(weights, load, names, [vocab, hidden], None)?;
        let positions = weights.get("wpe.weight", &[context, hidden])?;
        fn norm(weights: &Weights, name: &str, hidden: usize, eps: f32) -> Result<LayerNorm, ModelError> {
            let get = |part: &str| weights.get(&format!("{name}.{part}"), &[hidden]);
            Ok(LayerNorm::new(get("weight")?, get("bias")?, eps))
        }
        let mut blocks = Vec::new();
        for layer in 0..config.layers.min(load.depth) {
            // Checkpoints hold these layers as `inputs x outputs`.
            let stored = |name: &str, inputs: usize, outputs: usize| {
                let name = format!("h.{layer}.{name}");
                let bias = weights.get(&format!("{name}.bias"), &[outputs])?;
                let stored = weights.get_transposed(&format!("{name}.weight"), inputs, outputs)?;
                Ok::<_, ModelError>((Numbers::from(stored), Some(bias)))
            };
            let ((qkv, qkv_bias), (output, output_bias)) =
                (stored("attn.c_attn", hidden, 3 * hidden)?, stored("attn.c_proj", hidden, hidden)?);
            let ((up, up_bias), (down, down_bias)) =
                (stored("mlp.c_fc", hidden, feed_forward)?, stored("mlp.c_proj", feed_forward, hidden)?);
            let (qkv, output) = (Linear::pack(hidden, &[qkv], qkv_bias)?, Linear::pack(hidden, &[output], output_bias)?);
            let (up, down) = (Linear::pack_wide(hidden, &[up], up_bias)?, Linear::pack(feed_forward, &[down], down_bias)?);
            blocks.push(Block {
                attention_norm: norm(weights, &format!("h.{layer}.ln_1"), hidden, eps)?,
                qkv,
                output,
                feed_forward_norm: norm(weights, &format!("h.{layer}.ln_2"), hidden, eps)?,
                feed_forward: FeedForward::new(config.activation, up, down),
            });
        }
        let norm = norm(weights, "ln_f", hidden, eps)?;
        let positions = Embedding::new(hidden, positions);
        Ok(Self { config, embedding, positions, blocks, norm, head, precision: load.precision })
    }
}

impl Architecture for Gpt2 {
    fn shape(&self) -> Shape {
        let Gpt2Config { hidden, layers, context, vocab, .. } = self.config;
        Shape { hidden, layers, context, vocab }
    }

    fn positions(&self) -> usize {
        self.config.context
    }

    fn past_floats(&self, tokens: usize) -> usize {
        self.blocks.len() * 2 * self.config.hidden * tokens
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    fn embed(&self, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        let len = batch.ids.len() * self.config.hidden;
        self.embedding.forward(&batch.ids, scratch.x.get(len))?;
        let positions = scratch.attended.get(len);
        self.positions.forward(&batch.positions, positions)?;
        scratch.x.get(len).iter_mut().zip(positions).for_each(|(x, p)| *x += *p);
        Ok(())
    }

    fn block(&self, layer: usize, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        let (c, block) = (&self.config, &self.blocks[layer]);
        let tokens = batch.ids.len();
        let head_dim = c.hidden / c.heads;
        let [by_size, by_layer] = c.scaled;
        let scale = if by_size { 1.0 / (head_dim as f32).sqrt() } else { 1.0 } / if by_layer { (layer + 1) as f32 } else { 1.0 };
        let shape =
            AttentionShape { heads: c.heads, kv_heads: c.heads, head_dim, scale, window: None, causal: true, precision: self.precision };
        let width = shape.qkv();
        let x = scratch.x.get(tokens * c.hidden);
        let qkv = scratch.qkv.get(tokens * width);
        let attended = scratch.attended.get(tokens * c.hidden);
        let normed = scratch.normed.get(ROW_TILE * c.hidden);
        for (x, qkv) in x.chunks(ROW_TILE * c.hidden).zip(qkv.chunks_mut(ROW_TILE * width)) {
            let normed = &mut normed[..x.len()];
            block.attention_norm.forward(x, normed);
            block.qkv.forward(normed, qkv, Output::Set)?;
        }
        attend(shape, layer, batch, qkv, attended, &mut scratch.attention, (&mut scratch.probe, &mut scratch.past));
        for (x, attended) in x.chunks_mut(ROW_TILE * c.hidden).zip(attended.chunks(ROW_TILE * c.hidden)) {
            let normed = &mut normed[..x.len()];
            block.output.forward(attended, x, Output::Add)?;
            block.feed_forward_norm.forward(x, normed);
            block.feed_forward.add(normed, x, &mut scratch.feed_forward)?;
        }
        Ok(())
    }

    fn norm(&self, x: &[f32], out: &mut [f32]) {
        self.norm.forward(x, out);
    }

    fn head(&self) -> Option<&Head> {
        self.head.as_deref()
    }
}
