//! From paths, folders and globs to a sorted list of files.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use globset::GlobBuilder;

use super::{IoError, at};

/// Format of an input file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    /// Apache Parquet.
    Parquet,
    /// JSON lines, plain, gzip or zstd.
    Jsonl,
    /// Arrow IPC, file or stream.
    Arrow,
}

impl FileFormat {
    /// The format a file name stands for.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let base = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
        match base.rsplit_once('.')?.1 {
            "jsonl" | "ndjson" => Some(Self::Jsonl),
            "parquet" | "pq" if base == name => Some(Self::Parquet),
            "arrow" | "arrows" | "feather" | "ipc" if base == name => Some(Self::Arrow),
            _ => None,
        }
    }
}

/// One input file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputFile {
    /// Where it lies; `-` for standard input.
    pub path: PathBuf,
    /// Its path below the input root, with `/`: what identifies it in the output.
    pub relative: String,
    /// Its format; for standard input `None` until its first bytes are seen.
    pub format: Option<FileFormat>,
}

impl InputFile {
    /// Whether it is standard input.
    #[must_use]
    pub fn is_stdin(&self) -> bool {
        self.path == Path::new("-")
    }
}

/// Lists the files that `paths` name, sorted by relative path. A folder gives the files in it and below whose names have a known
/// extension; names that begin with `_` or `.` are skipped there.
///
/// # Errors
/// [`IoError`] if a path does not exist, a glob is wrong, a file's format cannot be told, two files have one relative path, `output`
/// lies inside an input folder, or nothing is found.
pub fn discover(paths: &[String], format: Option<FileFormat>, output: Option<&Path>) -> Result<Vec<InputFile>, IoError> {
    let mut found: BTreeMap<String, InputFile> = BTreeMap::new();
    let mut add = |path: PathBuf, relative: String, required: bool| -> Result<(), IoError> {
        let known = format.or_else(|| FileFormat::of_name(&relative));
        if known.is_none() {
            if required {
                return Err(IoError::Input(format!(
                    "{}: its name tells no format (known: .parquet .pq .jsonl .ndjson, also with .gz or .zst, .arrow .arrows .feather .ipc); \
                     set input.format",
                    path.display()
                )));
            }
            tracing::debug!(path = %path.display(), "skipped: its name tells no known format");
            return Ok(());
        }
        let file = InputFile { path, relative: relative.clone(), format: known };
        if let Some(other) = found.insert(relative.clone(), file.clone())
            && other.path != file.path
        {
            return Err(IoError::Input(format!(
                "{} and {} are both {relative} below their input roots; give their common folder instead",
                other.path.display(),
                file.path.display()
            )));
        }
        Ok(())
    };
    let mut stdin = false;
    for given in paths {
        let path = Path::new(given);
        if given == "-" {
            stdin = true;
        } else if path.is_dir() {
            refuse_output_inside(path, output)?;
            for (file, relative) in walk(path)? {
                add(file, relative, false)?;
            }
        } else if path.is_file() || is_pipe(path) {
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            add(path.to_owned(), name, true)?;
        } else if given.contains(['*', '?', '[', '{']) {
            let root = glob_root(path);
            if !root.is_dir() {
                return Err(IoError::Input(format!("{given}: the folder {} does not exist", root.display())));
            }
            let pattern = GlobBuilder::new(given)
                .literal_separator(true)
                .build()
                .map_err(|e| IoError::Input(format!("{given}: not a glob: {e}")))?
                .compile_matcher();
            refuse_output_inside(&root, output)?;
            let mut any = false;
            for (file, relative) in walk(&root)? {
                if pattern.is_match(&file) {
                    any = true;
                    add(file, relative, true)?;
                }
            }
            if !any {
                return Err(IoError::Input(format!("{given}: matches no file")));
            }
        } else {
            return Err(IoError::Input(format!("{given}: no such file or folder")));
        }
    }
    let mut files: Vec<InputFile> = found.into_values().collect();
    if stdin {
        if !files.is_empty() {
            return Err(IoError::Input("standard input (-) cannot be mixed with other inputs".into()));
        }
        files.push(InputFile { path: PathBuf::from("-"), relative: "stdin".into(), format });
    }
    if files.is_empty() {
        return Err(IoError::Input(match paths {
            [] => "no input: set input.paths in the pipeline or give --input".into(),
            _ => format!("no input file found in {}", paths.join(", ")),
        }));
    }
    Ok(files)
}

fn is_pipe(path: &Path) -> bool {
    path.exists() && !path.is_dir()
}

/// All files below a folder with their paths relative to it, hidden and underscored names left out.
fn walk(root: &Path) -> Result<Vec<(PathBuf, String)>, IoError> {
    let mut out = Vec::new();
    let mut folders = vec![(root.to_owned(), String::new())];
    while let Some((folder, relative)) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(at(&folder))? {
            let entry = entry.map_err(at(&folder))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(['_', '.']) {
                continue;
            }
            let path = entry.path();
            let below = if relative.is_empty() { name } else { format!("{relative}/{name}") };
            if path.is_dir() {
                folders.push((path, below));
            } else {
                out.push((path, below));
            }
        }
    }
    out.sort();
    Ok(out)
}

/// The folder part of a glob before its first wildcard.
fn glob_root(pattern: &Path) -> PathBuf {
    let plain = |c: &Component<'_>| !c.as_os_str().to_string_lossy().contains(['*', '?', '[', '{']);
    let root: PathBuf = pattern.components().take_while(plain).collect();
    if root.as_os_str().is_empty() { PathBuf::from(".") } else { root }
}

fn refuse_output_inside(input: &Path, output: Option<&Path>) -> Result<(), IoError> {
    let Some(output) = output else { return Ok(()) };
    let input = input.canonicalize().map_err(at(input))?;
    // The output may not exist yet: its nearest existing ancestor decides.
    let absolute = std::path::absolute(output).map_err(at(output))?;
    let existing = absolute.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let rest = absolute.strip_prefix(existing).unwrap_or(Path::new(""));
    let output = existing.canonicalize().map_err(at(existing))?.join(rest);
    if output.starts_with(&input) {
        return Err(IoError::Input(format!(
            "the output {} lies inside the input {}: its files would be read as input next time; choose a folder beside it",
            output.display(),
            input.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_skip_hidden_names_and_globs_keep_their_root() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b/x.jsonl", "b/_tmp.jsonl", "b/.h.jsonl", "_d/y.jsonl", "a.parquet", "note.txt", "c.jsonl.zst"] {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let list = |p: &str| -> Vec<String> {
            let given = dir.path().join(p).to_string_lossy().into_owned();
            discover(&[given], None, None).unwrap().into_iter().map(|f| f.relative).collect()
        };
        assert_eq!(list(""), ["a.parquet", "b/x.jsonl", "c.jsonl.zst"]);
        assert_eq!(list("*/*.jsonl"), ["b/x.jsonl"]);
        assert_eq!(list("b/x.jsonl"), ["x.jsonl"]);
        let inside = discover(&[dir.path().to_string_lossy().into()], None, Some(&dir.path().join("b/out")));
        assert!(inside.unwrap_err().to_string().contains("inside the input"));
        let none = discover(&[dir.path().join("nope").to_string_lossy().into()], None, None);
        assert!(none.unwrap_err().to_string().contains("no such file"));
        let odd = discover(&[dir.path().join("note.txt").to_string_lossy().into()], None, None);
        assert!(odd.unwrap_err().to_string().contains("input.format"));
    }
}
