//! Configurations: of which architecture a checkpoint is, and its sizes and constants.

use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::gguf_file;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::gemma4::{Gemma4, Gemma4Config};
use super::gpt_neox::{GptNeox, GptNeoxConfig};
use super::gpt2::{Gpt2, Gpt2Config};
use super::llama::{Llama, LlamaConfig};
use super::ops::{Activation, RotaryScaling};
use super::qwen3_5::{Qwen35, Qwen35Config};
use super::weights::{Weights, checkpoint};
use super::{Load, ModelError, Trunk, qwen2, qwen3};

/// Architectures that can be loaded from a hub directory.
const HUB: &str = "llama, qwen2, qwen3, gpt2, gpt_neox, gemma4, qwen3_5";
/// Architectures that can be loaded from a GGUF file.
const GGUF: &str = "llama, qwen2, qwen3, gpt2";

/// Sizes and constants of a checkpoint, by the trunk that runs it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Config {
    Llama(LlamaConfig),
    Gpt2(Gpt2Config),
    GptNeox(GptNeoxConfig),
    Qwen35(Qwen35Config),
    Gemma4(Gemma4Config),
}

impl Config {
    /// Blocks, L.
    pub(super) fn layers(&self) -> usize {
        match self {
            Self::Llama(c) => c.layers,
            Self::Gpt2(c) => c.layers,
            Self::GptNeox(c) => c.layers,
            Self::Qwen35(c) => c.layers,
            Self::Gemma4(c) => c.layers.len(),
        }
    }

    /// Positions the model was made for.
    pub(super) fn context(&self) -> usize {
        match self {
            Self::Llama(c) => c.context,
            Self::Gpt2(c) => c.context,
            Self::GptNeox(c) => c.context,
            Self::Qwen35(c) => c.context,
            Self::Gemma4(c) => c.context,
        }
    }

    /// Loads the trunk.
    pub(super) fn load(self, weights: &Weights, load: Load) -> Result<Arc<dyn Trunk>, ModelError> {
        Ok(match self {
            Self::Llama(config) => Arc::new(Llama::load(config, weights, load)?),
            Self::Gpt2(config) => Arc::new(Gpt2::load(config, weights, load)?),
            Self::GptNeox(config) => Arc::new(GptNeox::load(config, weights, load)?),
            Self::Qwen35(config) => Arc::new(Qwen35::load(config, weights, load)?),
            Self::Gemma4(config) => Arc::new(Gemma4::load(config, weights, load)?),
        })
    }

    /// Reads the text of a `config.json`; also returns the architecture's name.
    pub(super) fn from_hub(path: &Path, text: &str) -> Result<(String, Self), ModelError> {
        let outer: serde_json::Value = serde_json::from_str(text).map_err(|e| checkpoint(path, e.to_string()))?;
        // Models that also see or hear keep their language part apart.
        let mut value = outer.get("text_config").filter(|v| v.is_object()).unwrap_or(&outer).clone();
        if let (Some(inner), Some(tied)) = (value.as_object_mut(), outer.get("tie_word_embeddings")) {
            inner.entry("tie_word_embeddings").or_insert_with(|| tied.clone());
        }
        let json = Json { path, value };
        let kind: String = json.get("model_type")?.unwrap_or_default();
        let config = match kind.as_str() {
            "llama" => Self::Llama(LlamaConfig::from_hub(&json)?),
            "qwen2" => Self::Llama(qwen2::from_hub(&json)?),
            "qwen3" => Self::Llama(qwen3::from_hub(&json)?),
            "gpt2" => Self::Gpt2(Gpt2Config::from_hub(&json)?),
            "gpt_neox" => Self::GptNeox(GptNeoxConfig::from_hub(&json)?),
            "qwen3_5" | "qwen3_5_text" => Self::Qwen35(Qwen35Config::from_hub(&json)?),
            "gemma4" | "gemma4_text" => Self::Gemma4(Gemma4Config::from_hub(&json)?),
            other => return Err(checkpoint(path, format!("model_type {other:?} is not supported (supported: {HUB})"))),
        };
        Ok((kind, config))
    }

    /// Reads the metadata of a GGUF file; also returns the architecture's name.
    pub(super) fn from_gguf(path: &Path, content: &gguf_file::Content) -> Result<(String, Self), ModelError> {
        let kind = content.metadata.get("general.architecture").and_then(|v| v.to_string().ok()).cloned().unwrap_or_default();
        let meta = Metadata { path, content, prefix: &kind };
        let config = match kind.as_str() {
            "llama" | "qwen2" => Self::Llama(LlamaConfig::from_gguf(&meta)?),
            "qwen3" => Self::Llama(qwen3::from_gguf(&meta)?),
            "gpt2" => Self::Gpt2(Gpt2Config::from_gguf(&meta)?),
            other => return Err(checkpoint(path, format!("architecture {other:?} is not supported (supported in GGUF: {GGUF})"))),
        };
        Ok((kind, config))
    }
}

/// A `config.json`, or the part of it that describes the language model.
pub(super) struct Json<'a> {
    path: &'a Path,
    value: serde_json::Value,
}

/// What a configuration says of its rotary embedding.
pub(super) struct Rope {
    pub(super) theta: f32,
    pub(super) scaling: RotaryScaling,
    /// Share of a head that is rotated.
    pub(super) partial: Option<f32>,
}

impl Json<'_> {
    pub(super) fn fail(&self, reason: impl Into<String>) -> ModelError {
        checkpoint(self.path, reason)
    }

    /// A value that may be missing or null.
    pub(super) fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, ModelError> {
        match self.value.get(key) {
            None | Some(serde_json::Value::Null) => Ok(None),
            Some(value) => T::deserialize(value).map(Some).map_err(|e| self.fail(format!("{key}: {e}"))),
        }
    }

    /// A value that must be there.
    pub(super) fn need<T: DeserializeOwned>(&self, key: &str) -> Result<T, ModelError> {
        self.get(key)?.ok_or_else(|| self.fail(format!("{key} is missing")))
    }

    /// The activation that `key` names.
    pub(super) fn activation(&self, key: &str, default: Activation) -> Result<Activation, ModelError> {
        match self.get::<String>(key)?.as_deref() {
            None => Ok(default),
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu") => Ok(Activation::Gelu),
            Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Ok(Activation::GeluTanh),
            Some(other) => Err(self.fail(format!("{key} {other:?} is not supported (silu, gelu, gelu_new, gelu_pytorch_tanh)"))),
        }
    }

    /// Whether the output head shares the embedding's weights.
    pub(super) fn tied(&self, default: bool) -> Result<bool, ModelError> {
        Ok(self.get("tie_word_embeddings")?.unwrap_or(default))
    }

    /// The rotary embedding: `rope_parameters` of new configurations, `rope_theta` and `rope_scaling` of old ones.
    pub(super) fn rope(&self, theta_key: &str) -> Result<Rope, ModelError> {
        #[derive(Deserialize)]
        struct Raw {
            rope_theta: Option<f32>,
            #[serde(alias = "type")]
            rope_type: Option<String>,
            partial_rotary_factor: Option<f32>,
            factor: Option<f32>,
            low_freq_factor: Option<f32>,
            high_freq_factor: Option<f32>,
            original_max_position_embeddings: Option<f32>,
        }
        let raw: Option<Raw> = match self.get("rope_parameters")? {
            Some(raw) => Some(raw),
            None => self.get("rope_scaling")?,
        };
        let raw = raw.as_ref();
        let factor = |r: &Raw| r.factor.ok_or_else(|| self.fail("rope scaling without a factor"));
        let scaling = match raw.and_then(|r| Some((r, r.rope_type.as_deref()?))) {
            None | Some((_, "default")) => RotaryScaling::None,
            Some((r, "linear")) => RotaryScaling::Linear(factor(r)?),
            Some((r, "llama3")) => RotaryScaling::Llama3 {
                factor: factor(r)?,
                low: r.low_freq_factor.unwrap_or(1.0),
                high: r.high_freq_factor.unwrap_or(4.0),
                original_context: r.original_max_position_embeddings.unwrap_or(8192.0),
            },
            Some((_, other)) => return Err(self.fail(format!("rope type {other:?} is not supported (default, linear, llama3)"))),
        };
        let theta = match raw.and_then(|r| r.rope_theta) {
            Some(theta) => theta,
            None => self.get(theta_key)?.unwrap_or(10_000.0),
        };
        Ok(Rope { theta, scaling, partial: raw.and_then(|r| r.partial_rotary_factor) })
    }

    /// The window of each layer that slides, by `layer_types` or, where that is missing, by `slides`; none where it does not.
    pub(super) fn windows(&self, layers: usize, slides: impl Fn(usize) -> bool) -> Result<Vec<Option<usize>>, ModelError> {
        let Some(window) = self.get::<usize>("sliding_window")? else { return Ok(vec![None; layers]) };
        let types: Option<Vec<String>> = self.get("layer_types")?;
        let of_layer = |layer: usize| match &types {
            Some(types) => types.get(layer).is_some_and(|t| t == "sliding_attention"),
            None => slides(layer),
        };
        Ok((0..layers).map(|layer| of_layer(layer).then_some(window)).collect())
    }
}

/// Metadata of a GGUF file under its architecture's prefix.
pub(super) struct Metadata<'a> {
    pub(super) path: &'a Path,
    pub(super) content: &'a gguf_file::Content,
    prefix: &'a str,
}

impl Metadata<'_> {
    fn get(&self, key: &str) -> Option<&gguf_file::Value> {
        self.content.metadata.get(&format!("{}.{key}", self.prefix))
    }

    pub(super) fn fail(&self, reason: impl Into<String>) -> ModelError {
        checkpoint(self.path, reason)
    }

    pub(super) fn number(&self, key: &str) -> Option<usize> {
        let value = self.get(key)?;
        let wide = value.to_u64().ok().or_else(|| value.to_u32().ok().map(u64::from)).or_else(|| value.to_i32().ok().map(|v| v as u64));
        wide.map(|v| v as usize)
    }

    pub(super) fn need(&self, key: &str) -> Result<usize, ModelError> {
        self.number(key).ok_or_else(|| self.fail(format!("metadata key {}.{key} is missing", self.prefix)))
    }

    pub(super) fn float(&self, key: &str) -> Option<f32> {
        self.get(key).and_then(|v| v.to_f32().ok())
    }

    pub(super) fn word(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(|v| v.to_string().ok()).map(String::as_str)
    }

    /// Rows of the embedding.
    pub(super) fn vocab(&self) -> Result<usize, ModelError> {
        match self.content.tensor_infos.get("token_embd.weight") {
            Some(info) => Ok(info.shape.dims().first().copied().unwrap_or(0)),
            None => Err(self.fail("tensor token_embd.weight is missing")),
        }
    }

    pub(super) fn has_tensor(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_new_rope_keys_load() {
        let base =
            r#""model_type":"llama","hidden_size":8,"intermediate_size":16,"num_hidden_layers":1,"num_attention_heads":2,"vocab_size":9"#;
        let path = Path::new("config.json");
        let load = |more: &str| Config::from_hub(path, &format!("{{{base},{more}}}"));
        let old = load("\"rope_theta\":5000.0").unwrap();
        let new = load("\"rope_parameters\":{\"rope_theta\":5000.0,\"rope_type\":\"default\"}").unwrap();
        assert_eq!(old, new);
        assert!(load("\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2.0}").unwrap_err().to_string().contains("yarn"));
        let unknown = Config::from_hub(path, "{\"model_type\":\"mamba\"}").unwrap_err().to_string();
        assert!(unknown.contains("mamba") && unknown.contains("gpt_neox"));
        let missing = Config::from_hub(path, "{\"model_type\":\"qwen3\",\"hidden_size\":8}").unwrap_err().to_string();
        assert!(missing.contains("is missing"), "{missing}");
    }

    #[test]
    fn the_language_part_of_a_larger_model_is_read() {
        let text = r#"{"model_type":"big","tie_word_embeddings":false,"text_config":{"model_type":"qwen2","hidden_size":8,
            "intermediate_size":16,"num_hidden_layers":4,"num_attention_heads":2,"vocab_size":9,"sliding_window":32,
            "use_sliding_window":true,"max_window_layers":3}}"#;
        let (kind, config) = Config::from_hub(Path::new("config.json"), text).unwrap();
        let Config::Llama(config) = config else { panic!("another trunk") };
        assert_eq!((kind.as_str(), config.tied), ("qwen2", false));
        assert_eq!(config.windows, [None, None, None, Some(32)]);
    }
}
