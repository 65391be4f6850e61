//! Qwen2 and Qwen2.5: the llama trunk with biases on queries, keys and values (found in the checkpoint), and windows that may slide in
//! the upper layers.

use super::ModelError;
use super::config::Json;
use super::llama::LlamaConfig;

pub(super) fn from_hub(json: &Json<'_>) -> Result<LlamaConfig, ModelError> {
    let config = LlamaConfig::from_hub(json)?;
    let windows = sliding(json, config.layers)?;
    Ok(LlamaConfig { windows, ..config })
}

/// Windows as Qwen's configurations tell them: only if `use_sliding_window`, and from layer `max_window_layers` on.
pub(super) fn sliding(json: &Json<'_>, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    if !json.get("use_sliding_window")?.unwrap_or(false) {
        return Ok(vec![None; layers]);
    }
    let first: usize = json.get("max_window_layers")?.unwrap_or(28);
    json.windows(layers, |layer| layer >= first)
}
