//! Buffers for kernels: aligned, and in large pages where the system has them.
//!
//! Kernels walk through weights of hundreds of megabytes. In small pages, most of the first walk after a while goes by with looking up
//! where the pages lie: measured, four times the time of the product itself.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A cache line: what every block starts on.
const LINE: usize = 64;
/// A large page.
const PAGE: usize = 2 << 20;
/// Memory of this size and more comes in whole large pages.
const LARGE: usize = PAGE / 4;
/// Weights smaller than half of this share memory of this size, so that large pages are full.
const SHARED: usize = 16 * PAGE;

/// Memory of one allocation.
#[derive(Debug)]
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: owned memory, reached through the blocks that lie in it alone.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeros. On Linux, much memory is not touched yet: whoever writes it first, on all threads, has its pages made.
    fn new(bytes: usize) -> Self {
        let (bytes, align) = if bytes < LARGE { (bytes.max(LINE), LINE) } else { (bytes.next_multiple_of(PAGE), PAGE) };
        let layout = Layout::from_size_align(bytes, align).unwrap_or_else(|_| handle_alloc_error(Layout::new::<u8>()));
        #[cfg(target_os = "linux")]
        if align == PAGE {
            return Self { start: map(bytes).unwrap_or_else(|| handle_alloc_error(layout)), layout };
        }
        // SAFETY: the size is not zero.
        let Some(start) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        Self { start, layout }
    }
}

/// Maps whole large pages, at the boundary of one.
#[cfg(target_os = "linux")]
fn map(bytes: usize) -> Option<NonNull<u8>> {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
    // SAFETY: a new mapping, of which what lies beside the large pages is given back; nothing else knows its addresses. The advice changes no contents:
    // without large pages, small ones do.
    unsafe {
        let whole = mmap_anonymous(std::ptr::null_mut(), bytes + PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).ok()?;
        let before = whole.addr().next_multiple_of(PAGE) - whole.addr();
        let start = whole.byte_add(before);
        if before > 0 {
            munmap(whole, before).ok()?;
        }
        if before < PAGE {
            munmap(start.byte_add(bytes), PAGE - before).ok()?;
        }
        let _ = madvise(start, bytes, Advice::LinuxHugepage);
        NonNull::new(start.cast())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if self.layout.align() == PAGE {
            // SAFETY: mapped with this size in `new`.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.layout.size()) };
            return;
        }
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Plain numbers: what is all zero bits is a value.
///
/// # Safety
/// That must be so.
pub(super) unsafe trait Plain: Copy {}

// SAFETY: all bits zero is 0 in each.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}

/// A slice on a cache line boundary.
#[derive(Debug)]
pub(super) struct Block<T: Plain> {
    start: NonNull<T>,
    len: usize,
    /// What the slice lies in; none if it is empty.
    _memory: Option<Arc<Memory>>,
}

// SAFETY: a block is the only way to its part of the memory, as a boxed slice is.
unsafe impl<T: Plain + Send> Send for Block<T> {}
// SAFETY: as above.
unsafe impl<T: Plain + Sync> Sync for Block<T> {}

impl<T: Plain> Block<T> {
    /// `len` zeros, in memory of their own.
    pub(super) fn zeros(len: usize) -> Self {
        Self::place(Arc::new(Memory::new(len * size_of::<T>())), 0, len)
    }

    /// `len` zeros, next to other blocks made this way. For blocks that live about as long as one another.
    pub(super) fn beside_others(len: usize) -> Self {
        static LAST: Mutex<(Weak<Memory>, usize)> = Mutex::new((Weak::new(), 0));
        let bytes = len * size_of::<T>();
        if bytes >= SHARED / 2 {
            return Self::zeros(len);
        }
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let (memory, at) = match last.0.upgrade() {
            Some(memory) if last.1 + bytes <= SHARED => (memory, last.1),
            _ => (Arc::new(Memory::new(SHARED)), 0),
        };
        *last = (Arc::downgrade(&memory), (at + bytes).next_multiple_of(LINE));
        drop(last);
        Self::place(memory, at, len)
    }

    /// `len` elements from byte `at` of the memory on: a multiple of a line, after which there is room for them that no other block has or had.
    fn place(memory: Arc<Memory>, at: usize, len: usize) -> Self {
        assert!(
            align_of::<T>() <= LINE && at.is_multiple_of(LINE) && at + len * size_of::<T>() <= memory.layout.size(),
            "no room for a block"
        );
        // SAFETY: `at` lies inside the memory.
        let start = unsafe { memory.start.add(at) }.cast::<T>();
        Self { start, len, _memory: Some(memory) }
    }

    /// Replaces the block by one of at least `len` elements of any value, if it is shorter.
    pub(super) fn reserve(&mut self, len: usize) {
        if self.len < len {
            *self = Self::default();
            *self = Self::zeros(len);
        }
    }
}

impl<T: Plain> Default for Block<T> {
    fn default() -> Self {
        Self { start: NonNull::dangling(), len: 0, _memory: None }
    }
}

impl<T: Plain> Deref for Block<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `start` is `len` initialised elements, or dangling where there are none.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Block<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the borrow is exclusive, and no other block has these elements.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_and_grow() {
        for len in [0, 1, 17, LARGE / 4 - 1, LARGE / 4, PAGE / 4 + 5] {
            let mut block = Block::<u32>::zeros(len);
            assert!(block.len() == len && block.iter().all(|&v| v == 0));
            assert!(block.as_ptr().addr().is_multiple_of(if len < LARGE / 4 { LINE } else { PAGE }));
            block.reserve(len + 3);
            assert!(block.len() == len + 3);
        }
    }

    #[test]
    fn blocks_beside_one_another_keep_what_is_theirs() {
        let sizes = [3_usize, 16, 1 << 20, 5 << 20, 17, 1 << 20, 3 << 20, 5 << 20];
        let mut blocks: Vec<Block<u32>> = sizes.iter().map(|&len| Block::beside_others(len)).collect();
        for (i, block) in blocks.iter_mut().enumerate() {
            block.fill(i as u32);
        }
        // Half of them go; the others stay as they are.
        let mut left: Vec<(usize, Block<u32>)> = blocks.into_iter().enumerate().filter(|(i, _)| i % 2 == 1).collect();
        let mut last = Block::beside_others(1000);
        assert!(last.iter().all(|&v| v == 0));
        last.fill(99);
        left.push((99, last));
        for (i, block) in left {
            assert!(block.as_ptr().addr().is_multiple_of(LINE));
            assert!(block.iter().all(|&v| v == i as u32) && (i == 99 || block.len() == sizes[i]));
        }
    }
}
