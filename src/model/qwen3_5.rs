//! Qwen3.5: gated delta layers with a full attention layer after every few. Attention has an output gate, norms on heads, and a rotary
//! embedding on a part of each head; norms multiply by `1 + w`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::config::{Json, Rope};
use super::ops::{
    Activation, AttentionShape, DeltaShape, Embedding, GatedFeedForward, Head, Linear, Output, Precision, ROW_TILE, RmsNorm, Rotary,
    RotaryScaling, ShortConvolution, gated_delta, mul_activated, mul_sigmoid,
};
use super::weights::Weights;
use super::{Architecture, Batch, Load, ModelError, Scratch, Shape, attend, load_vocabulary};

/// Sizes and constants of a Qwen3.5 checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Qwen35Config {
    pub(super) hidden: usize,
    pub(super) feed_forward: usize,
    pub(super) layers: usize,
    /// For each layer whether it is full attention.
    pub(super) full: Vec<bool>,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) rotary_dims: usize,
    pub(super) key_heads: usize,
    pub(super) value_heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) kernel: usize,
    pub(super) vocab: usize,
    pub(super) context: usize,
    pub(super) eps: f32,
    pub(super) theta: f32,
    pub(super) scaling: RotaryScaling,
    pub(super) activation: Activation,
    pub(super) tied: bool,
}

impl Qwen35Config {
    pub(super) fn from_hub(json: &Json<'_>) -> Result<Self, ModelError> {
        let (hidden, heads): (usize, usize) = (json.need("hidden_size")?, json.need("num_attention_heads")?);
        let layers: usize = json.need("num_hidden_layers")?;
        let head_dim: usize = json.get("head_dim")?.unwrap_or(hidden / heads.max(1));
        let Rope { theta, scaling, partial } = json.rope("rope_theta")?;
        let share = match partial {
            Some(share) => share,
            None => json.get("partial_rotary_factor")?.unwrap_or(0.25),
        };
        let full = match json.get::<Vec<String>>("layer_types")? {
            Some(types) => types.iter().map(|t| t == "full_attention").collect(),
            None => {
                let interval: usize = json.get("full_attention_interval")?.unwrap_or(4);
                (1..=layers).map(|layer| layer.is_multiple_of(interval)).collect()
            }
        };
        let config = Self {
            hidden,
            feed_forward: json.need("intermediate_size")?,
            layers,
            full,
            heads,
            kv_heads: json.get("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            rotary_dims: (head_dim as f32 * share) as usize / 2 * 2,
            key_heads: json.need("linear_num_key_heads")?,
            value_heads: json.need("linear_num_value_heads")?,
            key_dim: json.need("linear_key_head_dim")?,
            value_dim: json.need("linear_value_head_dim")?,
            kernel: json.get("linear_conv_kernel_dim")?.unwrap_or(4),
            vocab: json.need("vocab_size")?,
            context: json.get("max_position_embeddings")?.unwrap_or(32_768),
            eps: json.get("rms_norm_eps")?.unwrap_or(1e-6),
            theta,
            scaling,
            activation: json.activation("hidden_act", Activation::Silu)?,
            tied: json.tied(false)?,
        };
        let sizes = [config.hidden, config.feed_forward, config.layers, config.heads, config.kv_heads, config.vocab, config.context];
        let inner = [config.key_heads, config.value_heads, config.key_dim, config.value_dim, config.kernel, config.rotary_dims];
        let fits = config.heads.is_multiple_of(config.kv_heads.max(1)) && config.value_heads.is_multiple_of(config.key_heads.max(1));
        if sizes.contains(&0) || inner.contains(&0) || !fits || config.full.len() != layers || config.rotary_dims > head_dim {
            return Err(json.fail(format!("its sizes fit no qwen3_5: {config:?}")));
        }
        Ok(config)
    }

    fn delta(&self) -> DeltaShape {
        DeltaShape { key_heads: self.key_heads, value_heads: self.value_heads, key_dim: self.key_dim, value_dim: self.value_dim }
    }
}

struct Attention {
    qkv: Linear,
    gate: Linear,
    head_norms: [RmsNorm; 2],
}

struct Delta {
    qkv: Linear,
    convolution: ShortConvolution,
    /// The output gate, then the step and the decay of each value head.
    gates: Linear,
    /// What the decay's softplus is multiplied by: `-e^A`.
    rate: Vec<f32>,
    bias: Vec<f32>,
    norm: RmsNorm,
}

enum Mixer {
    Attention(Attention),
    Delta(Delta),
}

struct Block {
    norm: RmsNorm,
    mixer: Mixer,
    output: Linear,
    feed_forward_norm: RmsNorm,
    feed_forward: GatedFeedForward,
}

/// A loaded Qwen3.5 trunk.
pub(super) struct Qwen35 {
    config: Qwen35Config,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    rotary: Rotary,
    head: Option<Arc<Head>>,
    precision: Precision,
}

impl Qwen35 {
    pub(super) fn load(config: Qwen35Config, weights: &Weights, load: Load) -> Result<Self, ModelError> {
        let Qwen35Config { hidden, feed_forward, heads, kv_heads, head_dim, vocab, eps, .. } = config;
        let shape = config.delta();
        let names = ("embed_tokens.weight", (!config.tied).then_some("lm_head.weight"));
        let (embedding, head) = load_vocabulary(weights, load, names, [vocab, hidden], None)?;
        // Norms around zero.
        let centred = |mut weight: Vec<f32>| {
            weight.iter_mut().for_each(|w| *w += 1.0);
            RmsNorm::new(weight, eps)
        };
        let mut blocks = Vec::new();
        for layer in 0..config.layers.min(load.depth) {
            let has_bias = weights.has(&format!("layers.{layer}.self_attn.q_proj.bias"));
            let get = |name: &str, shape: &[usize]| weights.get(&format!("layers.{layer}.{name}"), shape);
            let stored = |name: &str, shape: &[usize]| weights.get_numbers(&format!("layers.{layer}.{name}"), shape);
            let (mixer, output) = if config.full[layer] {
                // Each head's queries are followed by its gate.
                let (q, kv) = (heads * head_dim, kv_heads * head_dim);
                let split = |both: &[f32]| {
                    let run = both.len() / heads / 2;
                    let of =
                        |part: usize| both.chunks_exact(2 * run).flat_map(|head| &head[part * run..][..run]).copied().collect::<Vec<f32>>();
                    (of(0), of(1))
                };
                let (queries, gate) = split(&get("self_attn.q_proj.weight", &[2 * q, hidden])?);
                let rows =
                    [queries.into(), stored("self_attn.k_proj.weight", &[kv, hidden])?, stored("self_attn.v_proj.weight", &[kv, hidden])?];
                let (mut qkv_bias, mut gate_bias, mut output_bias) = (None, None, None);
                if has_bias {
                    let (queries, gate) = split(&get("self_attn.q_proj.bias", &[2 * q])?);
                    qkv_bias = Some([queries, get("self_attn.k_proj.bias", &[kv])?, get("self_attn.v_proj.bias", &[kv])?].concat());
                    (gate_bias, output_bias) = (Some(gate), Some(get("self_attn.o_proj.bias", &[hidden])?));
                }
                let attention = Attention {
                    qkv: Linear::pack(hidden, &rows, qkv_bias)?,
                    gate: Linear::pack(hidden, &[gate.into()], gate_bias)?,
                    head_norms: [
                        centred(get("self_attn.q_norm.weight", &[head_dim])?),
                        centred(get("self_attn.k_norm.weight", &[head_dim])?),
                    ],
                };
                (Mixer::Attention(attention), Linear::pack(q, &[stored("self_attn.o_proj.weight", &[hidden, q])?], output_bias)?)
            } else {
                let (values, n) = (shape.values(), shape.value_heads);
                let gates = [
                    stored("linear_attn.in_proj_z.weight", &[values, hidden])?,
                    stored("linear_attn.in_proj_b.weight", &[n, hidden])?,
                    stored("linear_attn.in_proj_a.weight", &[n, hidden])?,
                ];
                let delta = Delta {
                    qkv: Linear::pack(hidden, &[stored("linear_attn.in_proj_qkv.weight", &[shape.qkv(), hidden])?], None)?,
                    convolution: ShortConvolution::new(shape.qkv(), &get("linear_attn.conv1d.weight", &[shape.qkv(), 1, config.kernel])?),
                    gates: Linear::pack(hidden, &gates, None)?,
                    rate: get("linear_attn.A_log", &[n])?.iter().map(|a| -a.exp()).collect(),
                    bias: get("linear_attn.dt_bias", &[n])?,
                    norm: RmsNorm::new(get("linear_attn.norm.weight", &[shape.value_dim])?, eps),
                };
                (Mixer::Delta(delta), Linear::pack(values, &[stored("linear_attn.out_proj.weight", &[hidden, values])?], None)?)
            };
            let gate_up =
                [stored("mlp.gate_proj.weight", &[feed_forward, hidden])?, stored("mlp.up_proj.weight", &[feed_forward, hidden])?];
            let down = stored("mlp.down_proj.weight", &[hidden, feed_forward])?;
            blocks.push(Block {
                norm: centred(get("input_layernorm.weight", &[hidden])?),
                mixer,
                output,
                feed_forward_norm: centred(get("post_attention_layernorm.weight", &[hidden])?),
                feed_forward: GatedFeedForward::pack(hidden, config.activation, gate_up, None, down, None)?,
            });
        }
        let norm = centred(weights.get("norm.weight", &[hidden])?);
        let frequencies = config.scaling.frequencies(config.rotary_dims, config.theta);
        let rotary = Rotary::new(head_dim, &frequencies, config.context + load.extra);
        Ok(Self { embedding, config, blocks, norm, rotary, head, precision: load.precision })
    }

    fn attend(&self, layer: usize, attention: &Attention, norm: &RmsNorm, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        let c = &self.config;
        let scale = 1.0 / (c.head_dim as f32).sqrt();
        let shape = AttentionShape {
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            scale,
            window: None,
            causal: true,
            precision: self.precision,
        };
        let (tokens, width, q) = (batch.ids.len(), shape.qkv(), c.heads * c.head_dim);
        let x = scratch.x.get(tokens * c.hidden);
        let (qkv, gates) = (scratch.qkv.get(tokens * width), scratch.gates.get(tokens * q));
        let attended = scratch.attended.get(tokens * q);
        let normed = scratch.normed.get(ROW_TILE * c.hidden);
        let rows = x.chunks(ROW_TILE * c.hidden).zip(qkv.chunks_mut(ROW_TILE * width)).zip(gates.chunks_mut(ROW_TILE * q));
        for (((x, qkv), gates), positions) in rows.zip(batch.positions.chunks(ROW_TILE)) {
            let normed = &mut normed[..x.len()];
            norm.forward(x, normed);
            attention.qkv.forward(normed, qkv, Output::Set)?;
            attention.gate.forward(normed, gates, Output::Set)?;
            for (row, &position) in qkv.chunks_exact_mut(width).zip(positions) {
                let (queries, rest) = row.split_at_mut(q);
                attention.head_norms[0].in_place(queries);
                attention.head_norms[1].in_place(&mut rest[..c.kv_heads * c.head_dim]);
                self.rotary.forward(row, c.heads + c.kv_heads, position);
            }
        }
        attend(shape, layer, batch, qkv, attended, &mut scratch.attention, (&mut scratch.probe, &mut scratch.past));
        mul_sigmoid(gates, attended);
        Ok(())
    }

    fn delta(&self, layer: usize, delta: &Delta, norm: &RmsNorm, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        let c = &self.config;
        let shape = c.delta();
        let (tokens, width, values, n) = (batch.ids.len(), shape.qkv(), shape.values(), shape.value_heads);
        let gate_width = values + 2 * n;
        let x = scratch.x.get(tokens * c.hidden);
        let (qkv, gates) = (scratch.qkv.get(tokens * width), scratch.gates.get(tokens * gate_width));
        let mixed = scratch.attended.get(tokens * values);
        let normed = scratch.normed.get(ROW_TILE * c.hidden);
        let rows = x.chunks(ROW_TILE * c.hidden).zip(qkv.chunks_mut(ROW_TILE * width)).zip(gates.chunks_mut(ROW_TILE * gate_width));
        for ((x, qkv), gates) in rows {
            let normed = &mut normed[..x.len()];
            norm.forward(x, normed);
            delta.qkv.forward(normed, qkv, Output::Set)?;
            delta.gates.forward(normed, gates, Output::Set)?;
        }
        let (steps, decays) = scratch.steps.get(2 * tokens * n).split_at_mut(tokens * n);
        for ((row, steps), decays) in gates.chunks_exact(gate_width).zip(steps.chunks_exact_mut(n)).zip(decays.chunks_exact_mut(n)) {
            let (b, a) = row[values..].split_at(n);
            for (step, b) in steps.iter_mut().zip(b) {
                *step = 1.0 / (1.0 + (-b).exp());
            }
            for (((decay, a), bias), rate) in decays.iter_mut().zip(a).zip(&delta.bias).zip(&delta.rate) {
                let x = a + bias;
                let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
                *decay = rate * softplus;
            }
        }
        let running = shape.value_heads * shape.key_dim * shape.value_dim;
        for (i, span) in batch.sequences().enumerate() {
            let qkv = &mut qkv[span.start * width..span.end * width];
            // A block leaves its running state, then the last rows before the convolution.
            let kept = scratch.past.get_mut(i).and_then(Option::as_mut).map(|past| past.block(layer));
            let (mut state, before) = kept.as_deref().map_or((Vec::new(), Vec::new()), |kept| {
                let (state, before) = kept.split_at(kept.len().min(running));
                (state.to_vec(), before.to_vec())
            });
            let mut rows = before.clone();
            if kept.is_some() {
                rows.extend_from_slice(qkv);
                rows.drain(..rows.len().saturating_sub(delta.convolution.reach() * width));
            }
            delta.convolution.forward(&before, qkv, &mut scratch.delta.convolution);
            let (steps, decays) = (&steps[span.start * n..span.end * n], &decays[span.start * n..span.end * n]);
            let mixed = &mut mixed[span.start * values..span.end * values];
            gated_delta(shape, qkv, decays, steps, mixed, &mut state, &mut scratch.delta);
            if let Some(kept) = kept {
                *kept = state;
                kept.append(&mut rows);
            }
        }
        for (mixed, gates) in mixed.chunks_exact_mut(values).zip(gates.chunks_exact(gate_width)) {
            delta.norm.in_place(mixed);
            mul_activated(Activation::Silu, &gates[..values], mixed);
        }
        Ok(())
    }
}

impl Architecture for Qwen35 {
    fn shape(&self) -> Shape {
        let Qwen35Config { hidden, layers, context, vocab, .. } = self.config;
        Shape { hidden, layers, context, vocab }
    }

    fn positions(&self) -> usize {
        self.rotary.positions()
    }

    fn past_floats(&self, tokens: usize) -> usize {
        let (c, shape) = (&self.config, self.config.delta());
        let floats = |block: &Block| match &block.mixer {
            Mixer::Attention(_) => 2 * c.kv_heads * c.head_dim * tokens,
            Mixer::Delta(delta) => {
                shape.value_heads * shape.key_dim * shape.value_dim + tokens.min(delta.convolution.reach()) * shape.qkv()
            }
        };
        self.blocks.iter().map(floats).sum()
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    fn block(&self, layer: usize, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        let (c, block) = (&self.config, &self.blocks[layer]);
        let width = match &block.mixer {
            Mixer::Attention(attention) => {
                self.attend(layer, attention, &block.norm, batch, scratch)?;
                c.heads * c.head_dim
            }
            Mixer::Delta(delta) => {
                self.delta(layer, delta, &block.norm, batch, scratch)?;
                c.delta().values()
            }
        };
        let tokens = batch.ids.len();
        let (x, mixed) = (scratch.x.get(tokens * c.hidden), scratch.attended.get(tokens * width));
        let normed = scratch.normed.get(ROW_TILE * c.hidden);
        for (x, mixed) in x.chunks_mut(ROW_TILE * c.hidden).zip(mixed.chunks(ROW_TILE * width)) {
            let normed = &mut normed[..x.len()];
            block.output.forward(mixed, x, Output::Add)?;
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
