//! GPT-NeoX (Pythia): layer norm, rotary embedding on a part of each head, attention and feed-forward side by side.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::config::{Json, Rope};
use super::ops::{
    Activation, AttentionShape, Embedding, FeedForward, Head, LayerNorm, Linear, Output, Precision, ROW_TILE, Rotary, RotaryScaling,
};
use super::weights::Weights;
use super::{Architecture, Batch, Load, ModelError, Scratch, Shape, attend, load_vocabulary};

/// Sizes and constants of a GPT-NeoX checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct GptNeoxConfig {
    pub(super) hidden: usize,
    pub(super) feed_forward: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) vocab: usize,
    pub(super) context: usize,
    pub(super) eps: f32,
    pub(super) theta: f32,
    pub(super) scaling: RotaryScaling,
    /// Numbers of a head that are rotated.
    pub(super) rotary_dims: usize,
    pub(super) activation: Activation,
    /// Whether attention and feed-forward both read the block's input.
    pub(super) parallel: bool,
    /// Whether the attention's layers have biases.
    pub(super) attention_bias: bool,
    pub(super) tied: bool,
}

impl GptNeoxConfig {
    pub(super) fn from_hub(json: &Json<'_>) -> Result<Self, ModelError> {
        let (hidden, heads): (usize, usize) = (json.need("hidden_size")?, json.need("num_attention_heads")?);
        let Rope { theta, scaling, partial } = json.rope("rotary_emb_base")?;
        let share = match partial {
            Some(share) => share,
            None => json.get("rotary_pct")?.unwrap_or(0.25),
        };
        let config = Self {
            hidden,
            feed_forward: json.need("intermediate_size")?,
            layers: json.need("num_hidden_layers")?,
            heads,
            vocab: json.need("vocab_size")?,
            context: json.get("max_position_embeddings")?.unwrap_or(2048),
            eps: json.get("layer_norm_eps")?.unwrap_or(1e-5),
            theta,
            scaling,
            rotary_dims: (((hidden / heads.max(1)) as f32 * share) as usize).next_multiple_of(2),
            activation: json.activation("hidden_act", Activation::Gelu)?,
            parallel: json.get("use_parallel_residual")?.unwrap_or(true),
            attention_bias: json.get("attention_bias")?.unwrap_or(true),
            tied: json.tied(false)?,
        };
        let sizes = [config.hidden, config.feed_forward, config.layers, config.heads, config.vocab, config.context];
        if sizes.contains(&0) || !hidden.is_multiple_of(heads) || config.rotary_dims > hidden / heads {
            return Err(json.fail(format!("its sizes fit no gpt_neox: {config:?}")));
        }
        Ok(config)
    }
}

struct Block {
    attention_norm: LayerNorm,
    qkv: Linear,
    output: Linear,
    feed_forward_norm: LayerNorm,
    feed_forward: FeedForward,
}

/// A loaded GPT-NeoX trunk.
pub(super) struct GptNeox {
    config: GptNeoxConfig,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    rotary: Rotary,
    head: Option<Arc<Head>>,
    precision: Precision,
}

/// Rows of queries, keys and values that lie head by head, put into all queries, all keys, all values.
fn by_kind(rows: &[f32], heads: usize) -> Vec<f32> {
    let run = rows.len() / heads / 3;
    let head = |kind: usize| rows.chunks_exact(3 * run).flat_map(move |head| &head[kind * run..(kind + 1) * run]);
    head(0).chain(head(1)).chain(head(2)).copied().collect()
}

impl GptNeox {
    pub(super) fn load(config: GptNeoxConfig, weights: &Weights, load: Load) -> Result<Self, ModelError> {
        let GptNeoxConfig { hidden, feed_forward, heads, vocab, eps, .. } = config;
        let names = ("embed_in.weight", (!config.tied).then_some("embed_out.weight"));
        let (embedding, head) = load_vocabulary(weights, load, names, [vocab, hidden], None)?;
        let mut blocks = Vec::new();
        for layer in 0..config.layers.min(load.depth) {
            let get = |name: &str, shape: &[usize]| weights.get(&format!("layers.{layer}.{name}"), shape);
            let norm = |name: &str| {
                Ok::<_, ModelError>(LayerNorm::new(
                    get(&format!("{name}.weight"), &[hidden])?,
                    get(&format!("{name}.bias"), &[hidden])?,
                    eps,
                ))
            };
            let (attention_norm, feed_forward_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
            let qkv = by_kind(&get("attention.query_key_value.weight", &[3 * hidden, hidden])?, heads);
            let output = get("attention.dense.weight", &[hidden, hidden])?;
            let (qkv_bias, output_bias) = if config.attention_bias {
                let qkv = by_kind(&get("attention.query_key_value.bias", &[3 * hidden])?, heads);
                (Some(qkv), Some(get("attention.dense.bias", &[hidden])?))
            } else {
                (None, None)
            };
            let stored = |name: &str, shape: &[usize; 2]| {
                Ok::<_, ModelError>((get(&format!("{name}.weight"), shape)?.into(), Some(get(&format!("{name}.bias"), &shape[..1])?)))
            };
            let (up, up_bias) = stored("mlp.dense_h_to_4h", &[feed_forward, hidden])?;
            let (down, down_bias) = stored("mlp.dense_4h_to_h", &[hidden, feed_forward])?;
            let (up, down) = (Linear::pack_wide(hidden, &[up], up_bias)?, Linear::pack(feed_forward, &[down], down_bias)?);
            blocks.push(Block {
                attention_norm,
                qkv: Linear::pack(hidden, &[qkv.into()], qkv_bias)?,
                output: Linear::pack(hidden, &[output.into()], output_bias)?,
                feed_forward_norm,
                feed_forward: FeedForward::new(config.activation, up, down),
            });
        }
        let get = |name: &str| weights.get(name, &[hidden]);
        let norm = LayerNorm::new(get("final_layer_norm.weight")?, get("final_layer_norm.bias")?, eps);
        let frequencies = config.scaling.frequencies(config.rotary_dims, config.theta);
        let rotary = Rotary::new(hidden / heads, &frequencies, config.context + load.extra);
        Ok(Self { embedding, config, blocks, norm, rotary, head, precision: load.precision })
    }
}

impl Architecture for GptNeox {
    fn shape(&self) -> Shape {
        let GptNeoxConfig { hidden, layers, context, vocab, .. } = self.config;
        Shape { hidden, layers, context, vocab }
    }

    fn positions(&self) -> usize {
        self.rotary.positions()
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

    fn block(&self, layer: usize, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        let (c, block) = (&self.config, &self.blocks[layer]);
        let tokens = batch.ids.len();
        let head_dim = c.hidden / c.heads;
        let shape = AttentionShape {
            heads: c.heads,
            kv_heads: c.heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: None,
            causal: true,
            precision: self.precision,
        };
        let width = shape.qkv();
        let x = scratch.x.get(tokens * c.hidden);
        let qkv = scratch.qkv.get(tokens * width);
        let attended = scratch.attended.get(tokens * c.hidden);
        let normed = scratch.normed.get(ROW_TILE * c.hidden);
        for ((x, qkv), positions) in
            x.chunks(ROW_TILE * c.hidden).zip(qkv.chunks_mut(ROW_TILE * width)).zip(batch.positions.chunks(ROW_TILE))
        {
            let normed = &mut normed[..x.len()];
            block.attention_norm.forward(x, normed);
            block.qkv.forward(normed, qkv, Output::Set)?;
            for (row, &position) in qkv.chunks_exact_mut(width).zip(positions) {
                self.rotary.forward(row, 2 * c.heads, position);
            }
        }
        attend(shape, layer, batch, qkv, attended, &mut scratch.attention, (&mut scratch.probe, &mut scratch.past));
        for (x, attended) in x.chunks_mut(ROW_TILE * c.hidden).zip(attended.chunks(ROW_TILE * c.hidden)) {
            let normed = &mut normed[..x.len()];
            if c.parallel {
                block.feed_forward_norm.forward(x, normed);
                block.output.forward(attended, x, Output::Add)?;
            } else {
                block.output.forward(attended, x, Output::Add)?;
                block.feed_forward_norm.forward(x, normed);
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_sorted_by_kind() {
        // Two heads of one number each: q0 k0 v0 q1 k1 v1.
        assert_eq!(by_kind(&[0.0, 10.0, 20.0, 1.0, 11.0, 21.0], 2), [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]);
    }
}
