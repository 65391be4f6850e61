//! The llama family: RMS norm, rotary grouped-query attention, gated feed-forward. With norms on heads it is Qwen3, with biases Qwen2.

use std::fs::File;
use std::io::BufReader;
use std::sync::Arc;

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::config::{Json, Metadata, Rope};
use super::ops::{
    Activation, AttentionShape, Embedding, GatedFeedForward, Head, Linear, Output, Precision, ROW_TILE, RmsNorm, Rotary, RotaryScaling,
};
use super::weights::Weights;
use super::{Architecture, Batch, Load, ModelError, Scratch, Shape, attend, load_vocabulary};

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
    pub(super) activation: Activation,
    /// Whether each head of queries and keys is normalised.
    pub(super) head_norms: bool,
    /// For each layer the tokens that it sees back to, itself included; none is all.
    pub(super) windows: Vec<Option<usize>>,
    /// Whether the output head is the embedding.
    pub(super) tied: bool,
}

impl LlamaConfig {
    pub(super) fn from_hub(json: &Json<'_>) -> Result<Self, ModelError> {
        let (hidden, heads): (usize, usize) = (json.need("hidden_size")?, json.need("num_attention_heads")?);
        let layers = json.need("num_hidden_layers")?;
        let Rope { theta, scaling, .. } = json.rope("rope_theta")?;
        let config = Self {
            hidden,
            feed_forward: json.need("intermediate_size")?,
            layers,
            heads,
            kv_heads: json.get("num_key_value_heads")?.unwrap_or(heads),
            head_dim: json.get("head_dim")?.unwrap_or(hidden / heads.max(1)),
            vocab: json.need("vocab_size")?,
            context: json.get("max_position_embeddings")?.unwrap_or(2048),
            eps: json.get("rms_norm_eps")?.unwrap_or(1e-6),
            theta,
            scaling,
            activation: json.activation("hidden_act", Activation::Silu)?,
            head_norms: false,
            windows: vec![None; layers],
            tied: json.tied(false)?,
        };
        config.check().map_err(|reason| json.fail(reason))?;
        Ok(config)
    }

    pub(super) fn from_gguf(meta: &Metadata<'_>) -> Result<Self, ModelError> {
        let (hidden, heads) = (meta.need("embedding_length")?, meta.need("attention.head_count")?);
        let scaling = match meta.word("rope.scaling.type") {
            None | Some("none") => RotaryScaling::None,
            Some("linear") => RotaryScaling::Linear(meta.float("rope.scaling.factor").unwrap_or(1.0)),
            Some(other) => return Err(meta.fail(format!("rope scaling {other:?} is not supported (none, linear)"))),
        };
        let scaling = if meta.has_tensor("rope_freqs.weight") {
            let file = File::open(meta.path).map_err(|source| ModelError::Io { path: meta.path.display().to_string(), source })?;
            let tensor = meta.content.tensor(&mut BufReader::new(file), "rope_freqs.weight", &Device::Cpu);
            let factors = tensor.and_then(|t| t.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>());
            RotaryScaling::PerFrequency(factors.map_err(|e| meta.fail(format!("tensor rope_freqs.weight: {e}")))?)
        } else {
            scaling
        };
        let layers = meta.need("block_count")?;
        let config = Self {
            hidden,
            feed_forward: meta.need("feed_forward_length")?,
            layers,
            heads,
            kv_heads: meta.number("attention.head_count_kv").unwrap_or(heads),
            head_dim: meta.number("attention.key_length").unwrap_or(hidden / heads.max(1)),
            vocab: meta.vocab()?,
            context: meta.need("context_length")?,
            eps: meta.float("attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
            theta: meta.float("rope.freq_base").unwrap_or(10_000.0),
            scaling,
            activation: Activation::Silu,
            head_norms: false,
            windows: vec![None; layers],
            tied: !meta.has_tensor("output.weight"),
        };
        config.check().map_err(|reason| meta.fail(reason))?;
        Ok(config)
    }

    /// Refuses sizes that no llama has, before anything divides by them.
    fn check(&self) -> Result<(), String> {
        let sizes = [self.hidden, self.feed_forward, self.layers, self.heads, self.kv_heads, self.head_dim, self.vocab, self.context];
        if sizes.contains(&0) || !self.heads.is_multiple_of(self.kv_heads) || !self.head_dim.is_multiple_of(2) {
            return Err(format!("its sizes fit no llama: {self:?}"));
        }
        Ok(())
    }
}

struct Block {
    attention_norm: RmsNorm,
    qkv: Linear,
    /// Norms of the heads of queries and of keys.
    head_norms: Option<[RmsNorm; 2]>,
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
    head: Option<Arc<Head>>,
    precision: Precision,
}

impl Llama {
    pub(super) fn load(config: LlamaConfig, weights: &Weights, load: Load) -> Result<Self, ModelError> {
        let LlamaConfig { hidden, feed_forward, heads, kv_heads, head_dim, vocab, .. } = config;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let names = ("embed_tokens.weight", (!config.tied).then_some("lm_head.weight"));
        let (embedding, head) = load_vocabulary(weights, load, names, [vocab, hidden], None)?;
        let mut blocks = Vec::new();
        for layer in 0..config.layers.min(load.depth) {
            let get = |name: &str, shape: &[usize]| weights.get(&format!("layers.{layer}.{name}"), shape);
            let stored = |name: &str, shape: &[usize]| weights.get_numbers(&format!("layers.{layer}.{name}"), shape);
            let attention_norm = RmsNorm::new(get("input_layernorm.weight", &[hidden])?, config.eps);
            let feed_forward_norm = RmsNorm::new(get("post_attention_layernorm.weight", &[hidden])?, config.eps);
            let head_norms = if config.head_norms {
                let norm = |name: &str| Ok::<_, ModelError>(RmsNorm::new(get(name, &[head_dim])?, config.eps));
                Some([norm("self_attn.q_norm.weight")?, norm("self_attn.k_norm.weight")?])
            } else {
                None
            };
            let qkv = [
                stored("self_attn.q_proj.weight", &[q, hidden])?,
                stored("self_attn.k_proj.weight", &[kv, hidden])?,
                stored("self_attn.v_proj.weight", &[kv, hidden])?,
            ];
            let output = [stored("self_attn.o_proj.weight", &[hidden, q])?];
            let gate_up =
                [stored("mlp.gate_proj.weight", &[feed_forward, hidden])?, stored("mlp.up_proj.weight", &[feed_forward, hidden])?];
            let down = stored("mlp.down_proj.weight", &[hidden, feed_forward])?;
            let bias = |names: &[(&str, usize)]| -> Result<Option<Vec<f32>>, ModelError> {
                let full = |name: &str| format!("layers.{layer}.{name}.bias");
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
                head_norms,
                output: Linear::pack(q, &output, output_bias)?,
                feed_forward_norm,
                feed_forward: GatedFeedForward::pack(hidden, config.activation, gate_up, gate_up_bias, down, down_bias)?,
            });
        }
        let norm = RmsNorm::new(weights.get("norm.weight", &[hidden])?, config.eps);
        let rotary = Rotary::new(head_dim, &config.scaling.frequencies(head_dim, config.theta), config.context + load.extra);
        Ok(Self { embedding, config, blocks, norm, rotary, head, precision: load.precision })
    }
}

impl Architecture for Llama {
    fn shape(&self) -> Shape {
        let LlamaConfig { hidden, layers, context, vocab, .. } = self.config;
        Shape { hidden, layers, context, vocab }
    }

    fn positions(&self) -> usize {
        self.rotary.positions()
    }

    fn past_floats(&self, tokens: usize) -> usize {
        self.blocks.len() * 2 * self.config.kv_heads * self.config.head_dim * tokens
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    fn block(&self, layer: usize, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        let (c, block) = (&self.config, &self.blocks[layer]);
        let tokens = batch.ids.len();
        let scale = 1.0 / (c.head_dim as f32).sqrt();
        let window = c.windows.get(layer).copied().flatten();
        let shape = AttentionShape {
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            scale,
            window,
            causal: true,
            precision: self.precision,
        };
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
            block.qkv.forward(normed, qkv, Output::Set)?;
            for (row, &position) in qkv.chunks_exact_mut(width).zip(positions) {
                if let Some([queries, keys]) = &block.head_norms {
                    let (q, rest) = row.split_at_mut(attended_width);
                    queries.in_place(q);
                    keys.in_place(&mut rest[..c.kv_heads * c.head_dim]);
                }
                self.rotary.forward(row, c.heads + c.kv_heads, position);
            }
        }
        attend(shape, layer, batch, qkv, attended, &mut scratch.attention, (&mut scratch.probe, &mut scratch.past));
        for (x, attended) in x.chunks_mut(ROW_TILE * c.hidden).zip(attended.chunks(ROW_TILE * attended_width)) {
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
