//! Newtypes for the three ways of counting into a document.
//!
//! Mixing byte, character and token offsets is the commonest bug of every chunker, so the three do not convert into each other
//! implicitly.

use serde::{Deserialize, Serialize};

macro_rules! index {
    ($(#[$meta:meta])* $name:ident($inner:ty)) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The index as a `usize`, for slicing.
            #[must_use]
            pub fn get(self) -> usize {
                self.0 as usize
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index!(
    /// Tokens on the left of a place in a document: edge `b` lies between token `b - 1` and token `b`.
    TokenIdx(u32)
);
index!(
    /// UTF-8 bytes on the left of a place in a document.
    ByteIdx(u64)
);
index!(
    /// Unicode scalar values on the left of a place in a document.
    CharIdx(u64)
);
