//! Qwen3: the llama trunk with a norm on each head of queries and keys, and a head size apart from hidden / heads.

use super::ModelError;
use super::config::{Json, Metadata};
use super::llama::LlamaConfig;
use super::qwen2;

pub(super) fn from_hub(json: &Json<'_>) -> Result<LlamaConfig, ModelError> {
    let config = LlamaConfig::from_hub(json)?;
    let windows = qwen2::sliding(json, config.layers)?;
    Ok(LlamaConfig { head_dim: json.get("head_dim")?.unwrap_or(128), head_norms: true, windows, ..config })
}

pub(super) fn from_gguf(meta: &Metadata<'_>) -> Result<LlamaConfig, ModelError> {
    Ok(LlamaConfig { head_norms: true, ..LlamaConfig::from_gguf(meta)? })
}
