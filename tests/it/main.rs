//! Behaviour tests, through the binary, with the tiny model.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod browser;
mod commands;
#[path = "../common/mod.rs"]
mod common;
mod evaluate;
mod faults;
mod formats;
mod fuzz;
mod hub;
mod malformed;
mod nightly;
mod promises;
mod schemas;
mod tool;
