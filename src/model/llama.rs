//! The llama family: RMS norm, rotary grouped-query attention, gated SiLU feed-forward.

use serde::{Deserialize, Serialize};

use super::ops::{
    Activation, AttentionShape, Embedding, GatedFeedForward, Linear, Output, ROW_TILE, RmsNorm, Rotary, RotaryScaling, causal_attention,
};
use super::weights::Weights;
use super::{Batch, ModelError, Scratch, Shape, Tap, Trunk};

/// Sizes and constants of a llama checkpoint, from `config.json` or GGUF metadata.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct LlamaConfig {
    pub(super) hidden: usize,
    pub(super) feed_forward: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) vocab: usize,
    pub(super) context: usize,
    pub(super) eps: f32,
    pub(super) theta: f32,
    pub(super) scaling: RotaryScaling,
}

struct Block {
    attention_norm: RmsNorm,
    qkv: Linear,
    output: Linear,
    feed_forward_norm: RmsNorm,
    feed_forward: GatedFeedForward,
}

/// A loaded llama trunk.
pub(super) struct Llama {
    config: LlamaConfig,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    rotary: Rotary,
}

impl Llama {
    /// Reads the weights of the first `depth` blocks (or of all). Positions up to `extra` beyond the context get rotary tables (a reset prefix may shift a pass up).
    pub(super) fn load(config: LlamaConfig, weights: &mut Weights, depth: usize, extra: usize) -> Result<Self, ModelError> {
        let LlamaConfig { hidden, feed_forward, heads, kv_heads, head_dim, vocab, .. } = config;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let embedding = Embedding::new(hidden, weights.get("model.embed_tokens.weight", &[vocab, hidden])?);
        let mut blocks = Vec::with_capacity(config.layers);
        for layer in 0..config.layers.min(depth) {
            let mut get = |name: &str, shape: &[usize]| weights.get(&format!("model.layers.{layer}.{name}"), shape);
            let attention_norm = RmsNorm::new(get("input_layernorm.weight", &[hidden])?, config.eps);
            let feed_forward_norm = RmsNorm::new(get("post_attention_layernorm.weight", &[hidden])?, config.eps);
            let qkv = [
                get("self_attn.q_proj.weight", &[q, hidden])?,
                get("self_attn.k_proj.weight", &[kv, hidden])?,
                get("self_attn.v_proj.weight", &[kv, hidden])?,
            ];
            let output = [get("self_attn.o_proj.weight", &[hidden, q])?];
            let gate_up = [get("mlp.gate_proj.weight", &[feed_forward, hidden])?, get("mlp.up_proj.weight", &[feed_forward, hidden])?];
            let down = get("mlp.down_proj.weight", &[hidden, feed_forward])?;
            let mut bias = |names: &[(&str, usize)]| -> Result<Option<Vec<f32>>, ModelError> {
                let full = |name: &str| format!("model.layers.{layer}.{name}.bias");
                if !names.iter().any(|(name, _)| weights.has(&full(name))) {
                    return Ok(None);
                }
                let parts = names.iter().map(|(name, len)| weights.get(&full(name), &[*len]));
                Ok(Some(parts.collect::<Result<Vec<_>, _>>()?.concat()))
            };
            let qkv_bias = bias(&[("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)])?;
            let output_bias = bias(&[("self_attn.o_proj", hidden)])?;
            let gate_up_bias = bias(&[("mlp.gate_proj", feed_forward), ("mlp.up_proj", feed_forward)])?;
            let down_bias = bias(&[("mlp.down_proj", hidden)])?;
            blocks.push(Block {
                attention_norm,
                qkv: Linear::pack(hidden, &qkv, qkv_bias)?,
                output: Linear::pack(q, &output, output_bias)?,
                feed_forward_norm,
                feed_forward: GatedFeedForward::pack(hidden, Activation::Silu, gate_up, gate_up_bias, down, down_bias)?,
            });
        }
        let norm = RmsNorm::new(weights.get("model.norm.weight", &[hidden])?, config.eps);
        let rotary = Rotary::new(head_dim, &config.scaling.frequencies(head_dim, config.theta), config.context + extra);
        Ok(Self { config, embedding, blocks, norm, rotary })
    }

    fn block(&self, block: &Block, batch: &Batch, scratch: &mut Scratch) {
        let c = &self.config;
        let tokens = batch.ids.len();
        let shape = AttentionShape { heads: c.heads, kv_heads: c.kv_heads, head_dim: c.head_dim, scale: 1.0 / (c.head_dim as f32).sqrt() };
        let (width, attended_width) = (shape.qkv(), c.heads * c.head_dim);
        let x = scratch.x.get(tokens * c.hidden);
        let qkv = scratch.qkv.get(tokens * width);
        let attended = scratch.attended.get(tokens * attended_width);
        let normed = scratch.normed.get(ROW_TILE * c.hidden);

        for ((x, qkv), positions) in
            x.chunks(ROW_TILE * c.hidden).zip(qkv.chunks_mut(ROW_TILE * width)).zip(batch.positions.chunks(ROW_TILE))
        {
            let normed = &mut normed[..x.len()];
            block.attention_norm.forward(x, normed);
            block.qkv.forward(normed, qkv, Output::Set);
            for (row, &position) in qkv.chunks_exact_mut(width).zip(positions) {
                self.rotary.forward(row, c.heads + c.kv_heads, position);
            }
        }
        for span in batch.sequences() {
            let out = &mut attended[span.start * attended_width..span.end * attended_width];
            causal_attention(shape, &qkv[span.start * width..span.end * width], out, &mut scratch.attention);
        }
        for (x, attended) in x.chunks_mut(ROW_TILE * c.hidden).zip(attended.chunks(ROW_TILE * attended_width)) {
            let normed = &mut normed[..x.len()];
            block.output.forward(attended, x, Output::Add);
            block.feed_forward_norm.forward(x, normed);
            block.feed_forward.add(normed, x, &mut scratch.feed_forward);
        }
    }
}

impl Trunk for Llama {
    fn shape(&self) -> Shape {
        let LlamaConfig { hidden, layers, context, vocab, .. } = self.config;
        Shape { hidden, layers, context, vocab }
    }

    fn forward(&self, batch: &Batch, taps: &[Tap], scratch: &mut Scratch) -> Result<Vec<Vec<f32>>, ModelError> {
        let tokens = batch.ids.len();
        let positions = self.rotary.positions();
        if let Some(&position) = batch.positions.iter().find(|&&p| p as usize >= positions) {
            return Err(ModelError::Position { position, context: positions });
        }
        let depth = |tap: &Tap| match tap {
            Tap::Layer(layer) => (*layer).min(self.blocks.len()),
            Tap::Final => self.blocks.len(),
        };
        let last = taps.iter().map(depth).max().unwrap_or(0);
        let mut states = vec![Vec::new(); taps.len()];
        self.embedding.forward(&batch.ids, scratch.x.get(tokens * self.config.hidden))?;
        for layer in 0..=last {
            if layer > 0 {
                self.block(&self.blocks[layer - 1], batch, scratch);
            }
            let x = scratch.x.get(tokens * self.config.hidden);
            for (tap, out) in taps.iter().zip(&mut states).filter(|(tap, _)| depth(tap) == layer) {
                match tap {
                    Tap::Layer(_) => *out = x.to_vec(),
                    Tap::Final => {
                        *out = vec![0.0; x.len()];
                        self.norm.forward(x, out);
                    }
                }
            }
        }
        Ok(states)
    }
}
