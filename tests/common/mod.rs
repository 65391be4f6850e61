//! What several test files share.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;

/// The default model, which `make test` fetches.
pub fn model() -> PathBuf {
    let models = std::env::var_os("RIGHT_RESET_MODELS").map(PathBuf::from);
    let models = right_reset::model::models_dir(models.as_deref());
    right_reset::model::resolve("smollm2-135m", &models).unwrap_or_else(|e| panic!("{e}")).path
}
