//! Gemma 4 (text): sliding and full attention in turns with heads of two sizes, keys and values shared by the last layers, norms before
//! and after each part, an embedding of its own for each layer, and logits under a soft cap.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::config::Json;
use super::ops::{
    Activation, AttentionShape, Embedding, GatedFeedForward, Head, Linear, Output, Precision, ROW_TILE, RmsNorm, Rotary, RotaryScaling,
    mul_activated,
};
use super::weights::Weights;
use super::{Architecture, Batch, Load, ModelError, Scratch, Shape, attend, load_vocabulary};

/// One layer of a Gemma 4 checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct LayerConfig {
    /// Whether it sees everything before a token, not only a window.
    full: bool,
    head_dim: usize,
    kv_heads: usize,
    /// Whether it takes keys and values of the last layer of its kind that has its own.
    shared: bool,
}

/// Rotary frequencies of one kind of layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct RopeConfig {
    theta: f32,
    factor: f32,
    /// Share of the frequencies that turn at all.
    share: f32,
}

impl RopeConfig {
    fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let turning = (self.share * head_dim as f32 / 2.0) as usize;
        let mut frequencies = RotaryScaling::Linear(self.factor).frequencies(head_dim, self.theta);
        frequencies.iter_mut().skip(turning).for_each(|f| *f = 0.0);
        frequencies
    }
}

/// Sizes and constants of a Gemma 4 checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Gemma4Config {
    pub(super) hidden: usize,
    pub(super) feed_forward: usize,
    double_wide: bool,
    pub(super) layers: Vec<LayerConfig>,
    heads: usize,
    window: usize,
    pub(super) vocab: usize,
    /// Tokens and size of the embeddings per layer; size 0 is none.
    per_layer_vocab: usize,
    per_layer: usize,
    pub(super) context: usize,
    eps: f32,
    /// Of sliding and of full layers.
    ropes: [RopeConfig; 2],
    keys_are_values: bool,
    activation: Activation,
    cap: Option<f32>,
    tied: bool,
}

impl Gemma4Config {
    pub(super) fn from_hub(json: &Json<'_>) -> Result<Self, ModelError> {
        #[derive(Deserialize)]
        struct Override {
            head_dim: Option<usize>,
            num_key_value_heads: Option<usize>,
        }
        #[derive(Deserialize)]
        struct RawRope {
            rope_theta: Option<f32>,
            rope_type: Option<String>,
            factor: Option<f32>,
            partial_rotary_factor: Option<f32>,
        }
        if json.get("enable_moe_block")?.unwrap_or(false) {
            return Err(json.fail("mixtures of experts (enable_moe_block) are not supported"));
        }
        if json.get::<String>("use_bidirectional_attention")?.as_deref() == Some("all") {
            return Err(json.fail("bidirectional attention is not causal: such a model cannot be used"));
        }
        if json.get("attention_bias")?.unwrap_or(false) {
            return Err(json.fail("attention_bias is not supported for gemma4"));
        }
        let count: usize = json.need("num_hidden_layers")?;
        let (heads, kv_heads): (usize, usize) = (json.need("num_attention_heads")?, json.need("num_key_value_heads")?);
        let head_dim: usize = json.get("head_dim")?.unwrap_or(256);
        let keys_are_values = json.get("attention_k_eq_v")?.unwrap_or(false);
        let mut full: Vec<bool> = match json.get::<Vec<String>>("layer_types")? {
            Some(types) => types.iter().map(|t| t == "full_attention").collect(),
            None => (1..=count).map(|layer| layer.is_multiple_of(6)).collect(),
        };
        if let Some(last) = full.last_mut() {
            *last = true;
        }
        let overrides: Option<std::collections::HashMap<String, Override>> = json.get("per_layer_config")?;
        let global_dim: usize = json.get("global_head_dim")?.unwrap_or(512);
        let global_kv: Option<usize> = if keys_are_values { json.get("num_global_key_value_heads")? } else { None };
        let first_shared = count.saturating_sub(json.get("num_kv_shared_layers")?.unwrap_or(0));
        let layer = |(i, &full): (usize, &bool)| {
            let own = match &overrides {
                Some(overrides) => overrides.get(&i.to_string()).map(|o| (o.head_dim, o.num_key_value_heads)),
                None => full.then_some((Some(global_dim), global_kv)),
            };
            let (own_dim, own_kv) = own.unwrap_or_default();
            LayerConfig { full, head_dim: own_dim.unwrap_or(head_dim), kv_heads: own_kv.unwrap_or(kv_heads), shared: i >= first_shared }
        };
        let layers: Vec<LayerConfig> = full.iter().enumerate().map(layer).collect();
        let rope = |kind: &str, theta: f32, share: f32| -> Result<RopeConfig, ModelError> {
            let tables: Option<std::collections::HashMap<String, RawRope>> = json.get("rope_parameters")?;
            let Some(raw) = tables.and_then(|mut t| t.remove(kind)) else { return Ok(RopeConfig { theta, factor: 1.0, share }) };
            let theta = raw.rope_theta.unwrap_or(theta);
            match raw.rope_type.as_deref() {
                None | Some("default") => Ok(RopeConfig { theta, factor: 1.0, share: 1.0 }),
                Some("linear") => Ok(RopeConfig { theta, factor: raw.factor.unwrap_or(1.0), share: 1.0 }),
                Some("proportional") => {
                    Ok(RopeConfig { theta, factor: raw.factor.unwrap_or(1.0), share: raw.partial_rotary_factor.unwrap_or(1.0) })
                }
                Some(other) => Err(json.fail(format!("rope type {other:?} is not supported (default, linear, proportional)"))),
            }
        };
        let vocab = json.need("vocab_size")?;
        let config = Self {
            hidden: json.need("hidden_size")?,
            feed_forward: json.need("intermediate_size")?,
            double_wide: json.get("use_double_wide_mlp")?.unwrap_or(false),
            layers,
            heads,
            window: json.get("sliding_window")?.unwrap_or(512),
            vocab,
            per_layer_vocab: json.get("vocab_size_per_layer_input")?.unwrap_or(vocab),
            per_layer: json.get("hidden_size_per_layer_input")?.unwrap_or(0),
            context: json.get("max_position_embeddings")?.unwrap_or(131_072),
            eps: json.get("rms_norm_eps")?.unwrap_or(1e-6),
            ropes: [rope("sliding_attention", 10_000.0, 1.0)?, rope("full_attention", 1_000_000.0, 0.25)?],
            keys_are_values,
            activation: json.activation("hidden_activation", Activation::GeluTanh)?,
            cap: json.get("final_logit_softcapping")?,
            tied: json.tied(true)?,
        };
        let sizes = [config.hidden, config.feed_forward, config.heads, config.window, config.vocab, config.context];
        let fit = |layer: &LayerConfig| {
            let sound =
                layer.kv_heads > 0 && heads.is_multiple_of(layer.kv_heads) && layer.head_dim > 0 && layer.head_dim.is_multiple_of(2);
            sound && (!layer.shared || config.layers.iter().any(|l| !l.shared && l.full == layer.full))
        };
        if sizes.contains(&0) || count == 0 || config.layers.len() != count || !config.layers.iter().all(fit) {
            return Err(json.fail(format!("its sizes fit no gemma4: {config:?}")));
        }
        Ok(config)
    }
}

/// A layer's part of the embeddings per layer.
struct PerLayer {
    projection: Linear,
    gate: Linear,
    output: Linear,
    norm: RmsNorm,
}

struct Block {
    norm: RmsNorm,
    /// Queries, keys and values; queries alone where the others are shared.
    qkv: Linear,
    query_norm: RmsNorm,
    /// Norms of keys and, without weights, of values.
    key_norms: Option<[RmsNorm; 2]>,
    output: Linear,
    output_norm: RmsNorm,
    feed_forward_norm: RmsNorm,
    feed_forward: GatedFeedForward,
    after_norm: RmsNorm,
    per_layer: Option<PerLayer>,
    scalar: f32,
}

/// A loaded Gemma 4 trunk.
pub(super) struct Gemma4 {
    config: Gemma4Config,
    embedding: Embedding,
    per_layer: Option<(Embedding, RmsNorm)>,
    blocks: Vec<Block>,
    norm: RmsNorm,
    rotaries: [Rotary; 2],
    head: Option<Arc<Head>>,
    precision: Precision,
}

impl Gemma4 {
    pub(super) fn load(config: Gemma4Config, weights: &Weights, load: Load) -> Result<Self, ModelError> {
        let Gemma4Config { hidden, heads, vocab, eps, per_layer, .. } = config;
        let count = config.layers.len();
        let names = ("embed_tokens.weight", (!config.tied).then_some("lm_head.weight"));
        let (embedding, head) = load_vocabulary(weights, load, names, [vocab, hidden], config.cap)?;
        let embedding = embedding.scaled((hidden as f64).sqrt() as f32);
        let per_layer_tables = if per_layer > 0 {
            let table = weights.get_numbers("embed_tokens_per_layer.weight", &[config.per_layer_vocab, count * per_layer])?;
            let norm = RmsNorm::new(weights.get("per_layer_projection_norm.weight", &[per_layer])?, eps);
            let mut projection = weights.get("per_layer_model_projection.weight", &[count * per_layer, hidden])?;
            let scale = (hidden as f64).powf(-0.5) as f32;
            projection.iter_mut().for_each(|v| *v *= scale);
            Some((Embedding::new(count * per_layer, table), norm, projection))
        } else {
            None
        };
        let mut blocks = Vec::new();
        for (i, layer) in config.layers.iter().enumerate().take(load.depth) {
            let scalar = format!("layers.{i}.layer_scalar");
            let scalar = if weights.has(&scalar) { weights.get(&scalar, &[1])?[0] } else { 1.0 };
            let get = |name: &str, shape: &[usize]| weights.get(&format!("layers.{i}.{name}"), shape);
            let stored = |name: &str, shape: &[usize]| weights.get_numbers(&format!("layers.{i}.{name}"), shape);
            let (q, kv) = (heads * layer.head_dim, layer.kv_heads * layer.head_dim);
            let mut rows = vec![stored("self_attn.q_proj.weight", &[q, hidden])?];
            let query_norm = RmsNorm::new(get("self_attn.q_norm.weight", &[layer.head_dim])?, eps);
            let mut key_norms = None;
            if !layer.shared {
                let keys = stored("self_attn.k_proj.weight", &[kv, hidden])?;
                // Full layers may take the keys, before their norm, for values.
                let values =
                    if config.keys_are_values && layer.full { keys.clone() } else { stored("self_attn.v_proj.weight", &[kv, hidden])? };
                rows.extend([keys, values]);
                let keys = RmsNorm::new(get("self_attn.k_norm.weight", &[layer.head_dim])?, eps);
                key_norms = Some([keys, RmsNorm::new(vec![1.0; layer.head_dim], eps)]);
            }
            let output = Linear::pack(q, &[stored("self_attn.o_proj.weight", &[hidden, q])?], None)?;
            let wide = config.feed_forward * if config.double_wide && layer.shared { 2 } else { 1 };
            let gate_up = [stored("mlp.gate_proj.weight", &[wide, hidden])?, stored("mlp.up_proj.weight", &[wide, hidden])?];
            let down = stored("mlp.down_proj.weight", &[hidden, wide])?;
            let own = match &per_layer_tables {
                None => None,
                Some((_, _, projection)) => Some(PerLayer {
                    projection: Linear::pack(
                        hidden,
                        &[projection[i * per_layer * hidden..(i + 1) * per_layer * hidden].to_vec().into()],
                        None,
                    )?,
                    gate: Linear::pack(hidden, &[stored("per_layer_input_gate.weight", &[per_layer, hidden])?], None)?,
                    output: Linear::pack(per_layer, &[stored("per_layer_projection.weight", &[hidden, per_layer])?], None)?,
                    norm: RmsNorm::new(get("post_per_layer_input_norm.weight", &[hidden])?, eps),
                }),
            };
            let norm = |name: &str| Ok::<_, ModelError>(RmsNorm::new(get(name, &[hidden])?, eps));
            blocks.push(Block {
                norm: norm("input_layernorm.weight")?,
                qkv: Linear::pack(hidden, &rows, None)?,
                query_norm,
                key_norms,
                output,
                output_norm: norm("post_attention_layernorm.weight")?,
                feed_forward_norm: norm("pre_feedforward_layernorm.weight")?,
                feed_forward: GatedFeedForward::pack(hidden, config.activation, gate_up, None, down, None)?,
                after_norm: norm("post_feedforward_layernorm.weight")?,
                per_layer: own,
                scalar,
            });
        }
        let norm = RmsNorm::new(weights.get("norm.weight", &[hidden])?, eps);
        let rotary = |full: bool| {
            let head_dim = config.layers.iter().find(|l| l.full == full).map_or(2, |l| l.head_dim);
            Rotary::new(head_dim, &config.ropes[usize::from(full)].frequencies(head_dim), config.context + load.extra)
        };
        let rotaries = [rotary(false), rotary(true)];
        let per_layer = per_layer_tables.map(|(table, norm, _)| (table, norm));
        Ok(Self { embedding, per_layer, config, blocks, norm, rotaries, head, precision: load.precision })
    }

    fn attend(&self, index: usize, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        let (c, block, layer) = (&self.config, &self.blocks[index], &self.config.layers[index]);
        let window = (!layer.full).then_some(c.window);
        let shape = AttentionShape {
            heads: c.heads,
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            scale: 1.0,
            window,
            causal: true,
            precision: self.precision,
        };
        let (q, kv) = (c.heads * layer.head_dim, layer.kv_heads * layer.head_dim);
        let (tokens, width) = (batch.ids.len(), shape.qkv());
        let x = scratch.x.get(tokens * c.hidden);
        let qkv = scratch.qkv.get(tokens * width);
        let shared = scratch.shared[usize::from(layer.full)].get(tokens * 2 * kv);
        let attended = scratch.attended.get(tokens * q);
        let normed = scratch.normed.get(ROW_TILE * c.hidden);
        let products = scratch.gates.get(ROW_TILE * block.qkv.outputs());
        let rotary = &self.rotaries[usize::from(layer.full)];
        let rows = x.chunks(ROW_TILE * c.hidden).zip(qkv.chunks_mut(ROW_TILE * width)).zip(shared.chunks_mut(ROW_TILE * 2 * kv));
        for (((x, qkv), shared), positions) in rows.zip(batch.positions.chunks(ROW_TILE)) {
            let normed = &mut normed[..x.len()];
            let products = &mut products[..x.len() / c.hidden * block.qkv.outputs()];
            block.norm.forward(x, normed);
            block.qkv.forward(normed, products, Output::Set)?;
            let rows = qkv.chunks_exact_mut(width).zip(products.chunks_exact(block.qkv.outputs())).zip(shared.chunks_exact_mut(2 * kv));
            for (((row, product), shared), &position) in rows.zip(positions) {
                row[..product.len()].copy_from_slice(product);
                block.query_norm.in_place(&mut row[..q]);
                if let Some([keys, values]) = &block.key_norms {
                    keys.in_place(&mut row[q..q + kv]);
                    values.in_place(&mut row[q + kv..]);
                    rotary.forward(row, c.heads + layer.kv_heads, position);
                    // Of all layers of a kind with keys of their own, the last one's stay for those without.
                    shared.copy_from_slice(&row[q..]);
                } else {
                    rotary.forward(row, c.heads, position);
                    row[q..].copy_from_slice(shared);
                }
            }
        }
        attend(shape, index, batch, qkv, attended, &mut scratch.attention, (&mut scratch.probe, &mut scratch.past));
        Ok(())
    }
}

impl Architecture for Gemma4 {
    fn shape(&self) -> Shape {
        let Gemma4Config { hidden, context, vocab, .. } = self.config;
        Shape { hidden, layers: self.config.layers.len(), context, vocab }
    }

    fn positions(&self) -> usize {
        self.rotaries[0].positions()
    }

    fn past_floats(&self, tokens: usize) -> usize {
        self.config.layers[..self.blocks.len()].iter().map(|l| 2 * l.kv_heads * l.head_dim * tokens).sum()
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
        scratch.start.get(len).copy_from_slice(scratch.x.get(len));
        Ok(())
    }

    fn block(&self, index: usize, batch: &Batch, scratch: &mut Scratch) -> Result<(), ModelError> {
        self.attend(index, batch, scratch)?;
        let (c, block) = (&self.config, &self.blocks[index]);
        let q = c.heads * c.layers[index].head_dim;
        let tokens = batch.ids.len();
        let x = scratch.x.get(tokens * c.hidden);
        let start = scratch.start.get(tokens * c.hidden);
        let attended = scratch.attended.get(tokens * q);
        let normed = scratch.normed.get(ROW_TILE * c.hidden);
        let part = scratch.steps.get(ROW_TILE * c.hidden);
        let inputs = scratch.gates.get(2 * ROW_TILE * c.per_layer);
        let rows = x.chunks_mut(ROW_TILE * c.hidden).zip(attended.chunks(ROW_TILE * q)).zip(start.chunks(ROW_TILE * c.hidden));
        for (((x, attended), start), ids) in rows.zip(batch.ids.chunks(ROW_TILE)) {
            let (normed, part) = (&mut normed[..x.len()], &mut part[..x.len()]);
            let add = |x: &mut [f32], part: &[f32]| x.iter_mut().zip(part).for_each(|(x, p)| *x += p);
            block.output.forward(attended, part, Output::Set)?;
            block.output_norm.in_place(part);
            add(x, part);
            block.feed_forward_norm.forward(x, normed);
            part.fill(0.0);
            block.feed_forward.add(normed, part, &mut scratch.feed_forward)?;
            block.after_norm.in_place(part);
            add(x, part);
            if let (Some(own), Some((table, norm))) = (&block.per_layer, &self.per_layer) {
                let (inputs, gates) = inputs[..2 * ids.len() * c.per_layer].split_at_mut(ids.len() * c.per_layer);
                own.projection.forward(start, inputs, Output::Set)?;
                norm.in_place(inputs);
                // (projection + sqrt(size) * embedding) / sqrt(2)
                table.forward_part(ids, index * c.per_layer, gates)?;
                let scale = (c.per_layer as f64).sqrt() as f32;
                for (input, embedding) in inputs.iter_mut().zip(gates.iter()) {
                    *input = (*input + embedding * scale) * std::f32::consts::FRAC_1_SQRT_2;
                }
                own.gate.forward(x, gates, Output::Set)?;
                mul_activated(c.activation, gates, inputs);
                own.output.forward(inputs, part, Output::Set)?;
                own.norm.in_place(part);
                add(x, part);
            }
            x.iter_mut().for_each(|v| *v *= block.scalar);
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
