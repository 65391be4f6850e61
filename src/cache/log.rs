//! The value log: records one after another in plain files, each sealed and naming itself, so that the index over them can always be made again.

use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock};

use super::codec::{Entry, MAGIC};

/// A file of the log ends after this many bytes.
const FILE_BYTES: u64 = 1 << 30;
/// Bytes read at once while a file is gone through.
const CHUNK: usize = 8 << 20;

/// Where in what was read an entry lies; `None` beyond the end of the log.
pub(super) type Found = Option<Range<usize>>;

/// Where an entry lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Place {
    pub(super) file: u32,
    pub(super) offset: u64,
    pub(super) length: u32,
}

impl Place {
    pub(super) const BYTES: usize = 16;

    pub(super) fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..4].copy_from_slice(&self.file.to_le_bytes());
        out[4..12].copy_from_slice(&self.offset.to_le_bytes());
        out[12..].copy_from_slice(&self.length.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (file, rest) = bytes.split_first_chunk::<4>()?;
        let (offset, rest) = rest.split_first_chunk::<8>()?;
        let length = <[u8; 4]>::try_from(rest).ok()?;
        Some(Self { file: u32::from_le_bytes(*file), offset: u64::from_le_bytes(*offset), length: u32::from_le_bytes(length) })
    }

    /// The place right behind it.
    pub(super) fn behind(self) -> Self {
        Self { offset: self.offset + u64::from(self.length), length: 0, ..self }
    }
}

/// The files, open for reading, and the end of the last one for appending.
pub(super) struct ValueLog {
    dir: PathBuf,
    files: RwLock<Vec<File>>,
    tail: Mutex<Place>,
}

fn name(number: usize) -> String {
    format!("values-{number:05}.log")
}

impl ValueLog {
    /// Opens the log in a folder, made if there is none.
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        let mut files = Vec::new();
        loop {
            let path = dir.join(name(files.len()));
            if !files.is_empty() && !path.exists() {
                break;
            }
            files.push(File::options().read(true).write(true).create(true).truncate(false).open(path)?);
        }
        let offset = files.last().map_or(Ok(0), |f| f.metadata().map(|m| m.len()))?;
        let tail = Place { file: files.len() as u32 - 1, offset, length: 0 };
        File::open(dir)?.sync_all()?;
        Ok(Self { dir: dir.to_owned(), files: RwLock::new(files), tail: Mutex::new(tail) })
    }

    /// Appends bytes in one piece; gives the place of the first.
    pub(super) fn append(&self, bytes: &[u8]) -> io::Result<Place> {
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        if tail.offset >= FILE_BYTES {
            let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
            files[tail.file as usize].sync_data()?;
            let path = self.dir.join(name(files.len()));
            files.push(File::options().read(true).write(true).create(true).truncate(false).open(path)?);
            File::open(&self.dir)?.sync_all()?;
            *tail = Place { file: tail.file + 1, offset: 0, length: 0 };
        }
        let place = Place { length: bytes.len() as u32, ..*tail };
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        // What a full disk cut short is written over by the next.
        files[tail.file as usize].write_all_at(bytes, tail.offset)?;
        tail.offset += bytes.len() as u64;
        Ok(place)
    }

    /// Adds the bytes of a place, or of several that follow each other, to `out`; false beyond the end of the log.
    fn read_into(&self, place: Place, out: &mut Vec<u8>) -> io::Result<bool> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let Some(file) = files.get(place.file as usize) else { return Ok(false) };
        let start = out.len();
        out.resize(start + place.length as usize, 0);
        match file.read_exact_at(&mut out[start..], place.offset) {
            Ok(()) => return Ok(true),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => out.truncate(start),
            Err(e) => return Err(e),
        }
        Ok(false)
    }

    /// The entry at a place; `None` beyond the end of the log.
    pub(super) fn read(&self, place: Place) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        Ok(self.read_into(place, &mut bytes)?.then_some(bytes))
    }

    /// The entries at places in ascending order in one piece, and where in it each lies; those that follow each other are read in one go.
    pub(super) fn read_all(&self, places: impl ExactSizeIterator<Item = Place> + Clone) -> io::Result<(Vec<u8>, Vec<Found>)> {
        let mut bytes = Vec::with_capacity(places.clone().map(|p| p.length as usize).sum());
        let mut ranges = Vec::with_capacity(places.len());
        let mut places = places.peekable();
        while let Some(first) = places.next() {
            let (mut run, mut lengths) = (first, vec![first.length as usize]);
            while let Some(next) = places.next_if(|next| Self::follows(run, *next)) {
                run.length += next.length;
                lengths.push(next.length as usize);
            }
            let mut start = bytes.len();
            let found = self.read_into(run, &mut bytes)?;
            for length in lengths {
                ranges.push(found.then_some(start..start + length));
                start += length;
            }
        }
        Ok((bytes, ranges))
    }

    fn follows(first: Place, next: Place) -> bool {
        first.behind() == Place { length: 0, ..next }
    }

    /// Cuts the last file off behind a place in it.
    pub(super) fn cut_off(&self, end: Place) -> io::Result<()> {
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        if end.file == tail.file && end.offset < tail.offset {
            self.files.read().unwrap_or_else(PoisonError::into_inner)[tail.file as usize].set_len(end.offset)?;
            *tail = end;
        }
        Ok(())
    }

    /// Makes what was appended durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        let tail = self.tail();
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        files[tail.file as usize].sync_data()
    }

    /// The end of the log.
    pub(super) fn tail(&self) -> Place {
        *self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> io::Result<u64> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        files.iter().map(|f| f.metadata().map(|m| m.len())).sum()
    }

    /// Calls `take` with every sound entry from a place on, in order. Returns how many stretches of other bytes lay between them.
    pub(super) fn scan<E: From<io::Error>>(&self, from: Place, mut take: impl FnMut(Place, &Entry<'_>) -> Result<(), E>) -> Result<u64, E> {
        let count = self.files.read().unwrap_or_else(PoisonError::into_inner).len();
        let mut unsound = 0;
        for number in from.file as usize..count {
            let start = if number == from.file as usize { from.offset } else { 0 };
            unsound += scan_file(&self.dir.join(name(number)), start, |offset, length, entry| {
                take(Place { file: number as u32, offset, length: length as u32 }, entry)
            })?;
        }
        Ok(unsound)
    }
}

fn scan_file<E: From<io::Error>>(path: &Path, start: u64, mut take: impl FnMut(u64, usize, &Entry<'_>) -> Result<(), E>) -> Result<u64, E> {
    let mut file = File::open(path)?;
    io::Seek::seek(&mut file, io::SeekFrom::Start(start))?;
    // `window` holds the bytes from `base` on.
    let (mut window, mut base, mut at) = (Vec::new(), start, 0);
    let (mut ended, mut astray, mut unsound) = (false, false, 0);
    loop {
        match Entry::open(&window[at..]) {
            Ok((entry, length)) => {
                take(base + at as u64, length, &entry)?;
                at += length;
                astray = false;
                continue;
            }
            // It may be whole once more is read; where nothing more comes it is not.
            Err(Some(needed)) if !ended => {
                window.drain(..at);
                base += at as u64;
                at = 0;
                let wanted = needed.max(CHUNK) as u64;
                let before = window.len();
                (&mut file).take(wanted).read_to_end(&mut window)?;
                ended = window.len() == before;
                continue;
            }
            Err(_) => {}
        }
        if at >= window.len() {
            return Ok(unsound);
        }
        unsound += u64::from(!astray);
        astray = true;
        at += 1;
        at = window[at..].iter().position(|&b| b == MAGIC[0]).map_or(window.len(), |next| at + next);
    }
}

/// Bytes of all files below a folder.
pub(super) fn folder_bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    entries.map(|e| if e.path().is_dir() { folder_bytes(&e.path()) } else { e.metadata().map_or(0, |m| m.len()) }).sum()
}
