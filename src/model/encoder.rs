//! Text encoders of the BERT kind: a text in, one normalised embedding out.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tokenizers::{Tokenizer, TruncationParams};

use super::ops::{
    Activation, AttentionScratch, AttentionShape, Buffer, Embedding, FeedForward, FeedForwardScratch, LayerNorm, Linear, Output, Precision,
};
use super::registry::{self, hash_file, hash_files, remembered};
use super::weights::{Weights, checkpoint, safetensors_files};
use super::{Batch, ModelError, attend};

/// What identifies an encoder, known without loading it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncoderIdentity {
    /// blake3 over the sorted weight files' names and hashes, in hex.
    pub weights_hash: String,
    /// blake3 of `config.json`, in hex.
    pub config_hash: String,
    /// blake3 of `tokenizer.json`, in hex.
    pub tokenizer_hash: String,
    /// How states of tokens become an embedding: names of `1_Pooling/config.json`, joined by `+`.
    pub pooling: String,
    /// Tokens a text is cut off after, the encoder's own special ones included.
    pub max_tokens: usize,
    /// Bytes of all weight files.
    pub weight_bytes: u64,
}

/// How states of tokens become an embedding; several are put side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pooling {
    Cls,
    Mean,
    Max,
    MeanSqrtLen,
}

impl Pooling {
    const ALL: [Self; 4] = [Self::Cls, Self::Max, Self::Mean, Self::MeanSqrtLen];

    fn as_str(self) -> &'static str {
        match self {
            Self::Cls => "cls",
            Self::Mean => "mean",
            Self::Max => "max",
            Self::MeanSqrtLen => "mean_sqrt_len",
        }
    }

    /// Pools the states of a text (`tokens x hidden`).
    fn pool(self, states: &[f32], hidden: usize, out: &mut Vec<f64>) {
        let column = |i: usize| states.iter().skip(i).step_by(hidden).map(|v| f64::from(*v));
        let tokens = (states.len() / hidden) as f64;
        out.extend((0..hidden).map(|i| match self {
            Self::Cls => column(i).next().unwrap_or_default(),
            Self::Max => column(i).fold(f64::NEG_INFINITY, f64::max),
            Self::Mean => column(i).sum::<f64>() / tokens,
            Self::MeanSqrtLen => column(i).sum::<f64>() / tokens.sqrt(),
        }));
    }
}

/// The part of `config.json` that decides the network.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(default)]
    model_type: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    hidden_act: String,
    max_position_embeddings: usize,
    #[serde(default = "default_types")]
    type_vocab_size: usize,
    #[serde(default = "default_eps")]
    layer_norm_eps: f32,
    #[serde(default)]
    position_embedding_type: Option<String>,
}

fn default_types() -> usize {
    2
}

fn default_eps() -> f32 {
    1e-12
}

impl Config {
    fn check(&self) -> Result<Activation, String> {
        let kind = self.model_type.as_deref().unwrap_or("bert");
        if kind != "bert" {
            return Err(format!("model_type is {kind:?}; an encoder must be of type \"bert\""));
        }
        if let Some(other) = self.position_embedding_type.as_deref().filter(|p| *p != "absolute") {
            return Err(format!("position_embedding_type is {other:?}; \"absolute\" is known"));
        }
        let sizes = [self.vocab_size, self.hidden_size, self.num_attention_heads, self.intermediate_size, self.max_position_embeddings];
        if sizes.contains(&0) || self.type_vocab_size == 0 || !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return Err(format!("its sizes fit no encoder: {self:?}"));
        }
        match self.hidden_act.as_str() {
            "gelu" => Ok(Activation::Gelu),
            "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            other => Err(format!("hidden_act is {other:?}; gelu and gelu_new are known")),
        }
    }
}

/// What the files beside an encoder's weights say.
struct Description {
    config: Config,
    activation: Activation,
    pooling: Vec<Pooling>,
    max_tokens: usize,
}

impl Description {
    fn read(dir: &Path) -> Result<Self, ModelError> {
        let file = dir.join("config.json");
        let config: Config = serde_json::from_str(&read_text(&file)?).map_err(|e| checkpoint(&file, e.to_string()))?;
        let activation = config.check().map_err(|reason| checkpoint(&file, reason))?;
        let limit = optional(dir, "sentence_bert_config.json")?.and_then(|v| v.get("max_seq_length")?.as_u64());
        let max_tokens = limit.map_or(usize::MAX, |l| l as usize).min(config.max_position_embeddings);
        Ok(Self { pooling: pooling(dir, config.hidden_size)?, config, activation, max_tokens })
    }
}

/// What `modules.json` and the pooling module's `config.json` ask for.
fn pooling(dir: &Path, hidden: usize) -> Result<Vec<Pooling>, ModelError> {
    let mut folder = "1_Pooling".to_owned();
    if let Some(modules) = optional(dir, "modules.json")? {
        for module in modules.as_array().into_iter().flatten() {
            let word = |key: &str| module.get(key).and_then(|v| v.as_str()).unwrap_or_default();
            match word("type").rsplit('.').next().unwrap_or_default() {
                "Transformer" | "Normalize" => {}
                "Pooling" => folder = word("path").to_owned(),
                other => {
                    return Err(checkpoint(
                        &dir.join("modules.json"),
                        format!("has a module {other:?}; Transformer, Pooling and Normalize are known"),
                    ));
                }
            }
        }
    }
    let file = dir.join(&folder).join("config.json");
    let Some(value) = optional(dir, &format!("{folder}/config.json"))? else {
        let reason =
            "is missing: it says how states become an embedding; for the mean of all tokens write {\"pooling_mode_mean_tokens\": true}";
        return Err(checkpoint(&file, reason));
    };
    let on = |key: &str| value.get(key).and_then(serde_json::Value::as_bool).unwrap_or(false);
    if let Some(other) = ["pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken"].into_iter().find(|key| on(key)) {
        return Err(checkpoint(&file, format!("{other} is not supported (cls, mean, max and mean_sqrt_len are)")));
    }
    if let Some(width) = value.get("word_embedding_dimension").and_then(serde_json::Value::as_u64).filter(|w| *w != hidden as u64) {
        return Err(checkpoint(&file, format!("speaks of states of {width} numbers, the encoder's have {hidden}")));
    }
    let mut modes: Vec<Pooling> = Pooling::ALL
        .into_iter()
        .filter(|mode| match mode {
            Pooling::Cls => on("pooling_mode_cls_token"),
            _ => on(&format!("pooling_mode_{}_tokens", mode.as_str())),
        })
        .collect();
    // Newer files give one word.
    if let Some(word) = value.get("pooling_mode").and_then(|v| v.as_str()) {
        modes = Pooling::ALL.into_iter().filter(|mode| mode.as_str() == word).collect();
    }
    if modes.is_empty() {
        return Err(checkpoint(&file, "names no pooling that is supported (cls, mean, max, mean_sqrt_len)"));
    }
    Ok(modes)
}

fn read_text(path: &Path) -> Result<String, ModelError> {
    std::fs::read_to_string(path).map_err(|source| ModelError::Io { path: path.display().to_string(), source })
}

/// The JSON of a file that need not be there.
fn optional(dir: &Path, name: &str) -> Result<Option<serde_json::Value>, ModelError> {
    let path = dir.join(name);
    if !path.is_file() {
        return Ok(None);
    }
    serde_json::from_str(&read_text(&path)?).map(Some).map_err(|e| checkpoint(&path, e.to_string()))
}

/// The identity of an encoder in a hub directory, remembered in `memory` as [`registry::identity`] does.
///
/// # Errors
/// [`ModelError`] if a file cannot be read or describes no encoder that is supported.
pub fn encoder_identity(dir: &Path, memory: &Path) -> Result<EncoderIdentity, ModelError> {
    let weights = safetensors_files(dir)?;
    let files = ["config.json", "tokenizer.json", "modules.json", "sentence_bert_config.json", "1_Pooling/config.json"];
    let watched: Vec<PathBuf> = weights.iter().cloned().chain(files.map(|f| dir.join(f)).into_iter().filter(|p| p.exists())).collect();
    remembered(dir, "encoder", &watched, memory, || {
        let description = Description::read(dir)?;
        let pooling: Vec<_> = description.pooling.iter().map(|p| p.as_str()).collect();
        Ok(EncoderIdentity {
            weights_hash: hash_files(&weights)?,
            config_hash: hash_file(&dir.join("config.json"))?.to_hex().to_string(),
            tokenizer_hash: hash_file(&dir.join("tokenizer.json"))?.to_hex().to_string(),
            pooling: pooling.join("+"),
            max_tokens: description.max_tokens,
            weight_bytes: registry::bytes_of(&weights)?,
        })
    })
}

struct Block {
    qkv: Linear,
    output: Linear,
    attention_norm: LayerNorm,
    feed_forward: FeedForward,
    feed_forward_norm: LayerNorm,
}

/// A loaded encoder.
pub struct Encoder {
    dir: PathBuf,
    tokenizer: Tokenizer,
    pooling: Vec<Pooling>,
    hidden: usize,
    shape: AttentionShape,
    tokens: Embedding,
    /// With the embedding of the first token type added: every token is of it.
    positions: Embedding,
    norm: LayerNorm,
    blocks: Vec<Block>,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("dir", &self.dir).field("pooling", &self.pooling).finish_non_exhaustive()
    }
}

/// Buffers of an encoder, one per thread.
#[derive(Debug, Default)]
pub struct EncoderScratch {
    x: Buffer,
    normed: Buffer,
    qkv: Buffer,
    attended: Buffer,
    attention: AttentionScratch,
    feed_forward: FeedForwardScratch,
}

impl Encoder {
    /// Loads an encoder from a hub directory.
    ///
    /// # Errors
    /// [`ModelError`] if a file is missing, damaged, or asks for what is not supported.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let Description { config: c, activation, pooling, max_tokens } = Description::read(dir)?;
        let weights = Weights::open_hub(dir)?;
        let (hidden, wide) = (c.hidden_size, c.intermediate_size);
        let tokens = weights.get("embeddings.word_embeddings.weight", &[c.vocab_size, hidden])?;
        let mut positions = weights.get("embeddings.position_embeddings.weight", &[c.max_position_embeddings, hidden])?;
        let types = weights.get("embeddings.token_type_embeddings.weight", &[c.type_vocab_size, hidden])?;
        for row in positions.chunks_exact_mut(hidden) {
            row.iter_mut().zip(&types).for_each(|(p, t)| *p += t);
        }
        let norm = |weights: &Weights, name: &str| -> Result<LayerNorm, ModelError> {
            let get = |part: &str| weights.get(&format!("{name}.LayerNorm.{part}"), &[hidden]);
            Ok(LayerNorm::new(get("weight")?, get("bias")?, c.layer_norm_eps))
        };
        let first_norm = norm(&weights, "embeddings")?;
        let mut blocks = Vec::new();
        for layer in 0..c.num_hidden_layers {
            let at = |name: &str| format!("encoder.layer.{layer}.{name}");
            let linear = |names: &[&str], inputs: usize, outputs: usize| {
                let (mut rows, mut bias) = (Vec::new(), Vec::new());
                for name in names {
                    rows.push(weights.get_numbers(&format!("{}.weight", at(name)), &[outputs, inputs])?);
                    bias.extend(weights.get(&format!("{}.bias", at(name)), &[outputs])?);
                }
                Linear::pack(inputs, &rows, Some(bias))
            };
            let qkv = linear(&["attention.self.query", "attention.self.key", "attention.self.value"], hidden, hidden)?;
            let output = linear(&["attention.output.dense"], hidden, hidden)?;
            let (up, down) = (linear(&["intermediate.dense"], hidden, wide)?, linear(&["output.dense"], wide, hidden)?);
            blocks.push(Block {
                qkv,
                output,
                attention_norm: norm(&weights, &at("attention.output"))?,
                feed_forward: FeedForward::new(activation, up, down),
                feed_forward_norm: norm(&weights, &at("output"))?,
            });
        }

        let file = dir.join("tokenizer.json");
        let unusable = |e: tokenizers::Error| checkpoint(&file, e.to_string());
        let mut tokenizer = Tokenizer::from_file(&file).map_err(unusable)?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(Some(TruncationParams { max_length: max_tokens, ..TruncationParams::default() })).map_err(unusable)?;
        let ids = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        if ids > c.vocab_size {
            let reason = format!("its tokenizer has {ids} tokens, its embedding {} rows: they belong to different models", c.vocab_size);
            return Err(checkpoint(dir, reason));
        }
        let head_dim = hidden / c.num_attention_heads;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let heads = c.num_attention_heads;
        Ok(Self {
            dir: dir.to_owned(),
            tokenizer,
            pooling,
            hidden,
            shape: AttentionShape { heads, kv_heads: heads, head_dim, scale, window: None, causal: false, precision: Precision::F32 },
            tokens: Embedding::new(hidden, tokens),
            positions: Embedding::new(hidden, positions),
            norm: first_norm,
            blocks,
        })
    }

    /// The embedding of each text: its length is 1. A text longer than the encoder takes is cut off.
    ///
    /// # Errors
    /// [`ModelError::Checkpoint`] if the tokenizer fails on one.
    pub fn embed(&self, texts: &[&str], scratch: &mut EncoderScratch) -> Result<Vec<Vec<f64>>, ModelError> {
        let mut batch = Batch::default();
        for text in texts {
            let encoding = self.tokenizer.encode(*text, true).map_err(|e| checkpoint(&self.dir, e.to_string()))?;
            batch.push(encoding.get_ids().iter().copied().zip(0..));
        }
        self.forward(&batch, scratch)?;
        let (hidden, states) = (self.hidden, scratch.x.get(batch.ids.len() * self.hidden));
        let embedding = |span: std::ops::Range<usize>| {
            let mut embedding = Vec::new();
            self.pooling.iter().for_each(|mode| mode.pool(&states[span.start * hidden..span.end * hidden], hidden, &mut embedding));
            let norm = embedding.iter().map(|v| v * v).sum::<f64>().sqrt();
            embedding.iter_mut().for_each(|v| *v /= norm);
            embedding
        };
        Ok(batch.sequences().map(embedding).collect())
    }

    /// Leaves the last block's states in `scratch.x`.
    fn forward(&self, batch: &Batch, scratch: &mut EncoderScratch) -> Result<(), ModelError> {
        let len = batch.ids.len() * self.hidden;
        let (x, normed) = (scratch.x.get(len), scratch.normed.get(len));
        self.tokens.forward(&batch.ids, normed)?;
        self.positions.forward(&batch.positions, x)?;
        normed.iter_mut().zip(&*x).for_each(|(n, x)| *n += x);
        self.norm.forward(normed, x);
        let (qkv, attended) = (scratch.qkv.get(3 * len), scratch.attended.get(len));
        for block in &self.blocks {
            block.qkv.forward(x, qkv, Output::Set)?;
            attend(self.shape, 0, batch, qkv, attended, &mut scratch.attention, (&mut None, &mut []));
            block.output.forward(attended, x, Output::Add)?;
            block.attention_norm.forward(x, normed);
            x.copy_from_slice(normed);
            block.feed_forward.add(x, normed, &mut scratch.feed_forward)?;
            block.feed_forward_norm.forward(normed, x);
        }
        Ok(())
    }
}
