//! Right Reset: cuts documents into chunks where a causal language model depends least on what came before.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

/// A named step at which a test can let the process die at once, as a power cut would. Nothing but in test builds.
macro_rules! kill_point {
    ($name:literal) => {
        fail::fail_point!($name, |_| std::process::abort())
    };
}

pub mod cache;
pub mod eval;
mod hash;
pub mod index;
pub mod io;
pub mod model;
pub mod pipeline;
pub mod report;
pub mod score;
pub mod segment;
pub mod text;
