//! Right Reset: cuts documents into chunks where a causal language model depends least on what came before.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod cache;
pub mod index;
pub mod io;
pub mod model;
pub mod pipeline;
pub mod score;
pub mod segment;
pub mod text;
