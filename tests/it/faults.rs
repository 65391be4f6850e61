//! Faults: kills, full disks, missing permissions, flipped bytes, torn manifests, second processes, signals. Each ends in the right output, byte for byte, or
//! in an error that says what to do. `RIGHT_RESET_FAULTS` multiplies the number of tries (`make faults`).

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::nightly::parquet;
use crate::tool::{Place, done, prose, root};

fn tries(usual: usize) -> usize {
    usual * std::env::var("RIGHT_RESET_FAULTS").ok().map_or(1, |n| n.parse().expect("RIGHT_RESET_FAULTS is a number"))
}

/// Numbers, the same each time but for the seed of the day in long runs.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) + 1)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Several files of both formats, and what a run makes of them when nothing goes wrong.
fn workload() -> (Place, BTreeMap<String, Vec<u8>>) {
    let texts = prose(260, 14);
    let fill = || {
        let place = Place::new();
        for (i, some) in texts[..200].chunks(25).enumerate() {
            place.documents(&format!("in/{i}.jsonl"), some);
        }
        parquet(&place.path("in/z.parquet"), &texts[200..], 20);
        place
    };
    let reference = fill();
    reference.run(&["--set", "output.format=parquet"]).ok();
    (fill(), reference.data("out"))
}

const PARQUET: [&str; 2] = ["--set", "output.format=parquet"];

/// The run is over, and all is as it must be.
fn is_right(place: &Place, expected: &BTreeMap<String, Vec<u8>>, what: &str) {
    let found = place.data("out");
    assert!(found.keys().eq(expected.keys()), "{what}: {:?}", found.keys());
    for (name, bytes) in expected {
        assert!(found[name] == *bytes, "{what}: {name} differs");
    }
    assert!(place.path("out/_SUCCESS").exists(), "{what}");
    let rows = &place.summary("out")["rows"];
    assert_eq!((rows["read"].as_u64(), rows["chunked"].as_u64()), (Some(260), Some(260)), "{what}");
}

#[test]
fn killed_at_random_instants_200_times() {
    let (place, expected) = workload();
    let mut dice = Dice::new(1);
    let (mut kills, mut rounds) = (0, 0);
    let wanted = tries(200);
    while kills < wanted {
        let mut child = place.command(&[&["run", "p.toml"][..], &PARQUET].concat()).stderr(Stdio::piped()).spawn().unwrap();
        // Mostly while it works, sometimes while it starts or ends.
        let longest = if dice.below(4) == 0 { 40 } else { 250 };
        std::thread::sleep(Duration::from_millis(5 + dice.below(longest)));
        let ended = child.try_wait().unwrap();
        if ended.is_none() {
            child.kill().unwrap();
            kills += 1;
        }
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!text.contains("panicked"), "after {kills} kills:\n{text}");
        if ended.is_some() {
            assert_eq!(output.status.code(), Some(0), "after {kills} kills:\n{text}");
            is_right(&place, &expected, "a run between kills");
            rounds += 1;
            // Again, sometimes with an empty cache, sometimes with a lost file.
            let lost = dice.below(3);
            if lost == 0 {
                std::fs::remove_dir_all(place.path("cache")).unwrap();
            }
            if lost == 1 {
                let name = expected.keys().nth(dice.below(expected.len() as u64) as usize).unwrap();
                std::fs::remove_file(place.path("out").join(name)).unwrap();
            } else {
                std::fs::remove_dir_all(place.path("out")).unwrap();
            }
        }
    }
    place.run(&PARQUET).ok();
    is_right(&place, &expected, &format!("{kills} kills, {rounds} runs came through"));
    place.tool(&["cache", "verify", "p.toml"]).ok();
}

#[test]
fn killed_ranks_leave_what_the_others_made() {
    let (place, _) = workload();
    let run = |rank: u32| place.command(&["run", "p.toml", "--rank", &rank.to_string(), "--world-size", "3"]);
    let mut dice = Dice::new(2);
    for _ in 0..tries(12) {
        let children: Vec<_> = (0..3).map(|rank| run(rank).stderr(Stdio::null()).spawn().unwrap()).collect();
        for mut child in children {
            std::thread::sleep(Duration::from_millis(dice.below(120)));
            // It may be done.
            let _ = child.kill();
            child.wait().unwrap();
        }
    }
    (0..3).for_each(|rank| drop(done(run(rank).output().unwrap()).ok()));
    place.run(&["--output", "single", "--set", "cache.path=single-cache"]).ok();
    let rows = |output: &str| -> Vec<String> {
        let mut rows: Vec<String> = place.chunks(output).iter().map(|c| format!("{}{}", c["chunk_id"], c["doc_id"])).collect();
        rows.sort();
        rows
    };
    assert_eq!(rows("out"), rows("single"));
    assert!(place.path("out/_SUCCESS").exists());
}

/// A run whose files may have so many KiB at most, as on a disk that is full then.
fn with_small_files(place: &Place, kib: u64, arguments: &[&str]) -> Output {
    let script = format!("trap '' XFSZ; ulimit -f {}; exec \"$@\"", kib * 2);
    let plain = place.command(arguments);
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh"]).arg(plain.get_program()).args(plain.get_args()).stdin(Stdio::null());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.current_dir(plain.get_current_dir().unwrap()).output().unwrap()
}

#[test]
fn a_full_disk_is_said_and_loses_nothing() {
    let (place, expected) = workload();
    let arguments = [&["run", "p.toml"][..], &PARQUET].concat();
    let (mut parts, mut cache) = (0, 0);
    // While the cache is written, at several sizes.
    for kib in (4..=600).step_by(if tries(1) > 1 { 8 } else { 60 }) {
        let out = with_small_files(&place, kib, &arguments);
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!text.contains("panicked"), "{kib} KiB:\n{text}");
        if out.status.success() {
            break;
        }
        assert!([1, 75].contains(&out.status.code().unwrap_or(-1)), "{kib} KiB: {:?}\n{text}", out.status);
        assert!(text.contains("room there") || text.contains("free space"), "{kib} KiB:\n{text}");
        cache += u64::from(text.contains("free space"));
    }
    place.run(&PARQUET).ok();
    is_right(&place, &expected, "after a full disk under the cache");
    // While parts are written.
    std::fs::remove_dir_all(place.path("out")).unwrap();
    let arguments = [&arguments[..], &["--set", "cache.mode=off"]].concat();
    for kib in [1, 2, 3, 5, 8, 12, 16] {
        let out = with_small_files(&place, kib, &arguments);
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!text.contains("panicked"), "{kib} KiB:\n{text}");
        parts += u64::from(!out.status.success() && text.contains("room there"));
    }
    place.run(&PARQUET).ok();
    is_right(&place, &expected, "after a full disk under the output");
    assert!(parts > 0 && cache > 0, "{parts} and {cache} failures");
}

#[test]
#[allow(clippy::print_stderr)]
fn a_small_file_system_fills_up_and_empties_again() {
    let (place, expected) = workload();
    let small = place.path("small");
    std::fs::create_dir(&small).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(&small).output();
    if !mounted.is_ok_and(|o| o.status.success()) {
        eprintln!("not allowed to mount a file system: the test with limits on file sizes has to do");
        return;
    }
    std::fs::write(small.join("ballast"), vec![0; 900 << 10]).unwrap();
    let arguments = [&["--output", "small/out"][..], &PARQUET].concat();
    let full = place.run(&arguments);
    std::fs::remove_file(small.join("ballast")).unwrap();
    let again = place.run(&arguments);
    let found = place.data("small/out");
    let unmounted = Command::new("umount").arg(&small).status().unwrap();
    assert!(unmounted.success());
    full.fails(1, "make room there");
    again.ok();
    assert_eq!(found, expected);
}

#[test]
fn a_cache_that_may_not_be_written_is_said() {
    let place = Place::with_documents(&prose(5, 20));
    place.run(&["--output", "first"]).ok();
    // The binary and the model lie where another user may read them.
    let open = |path: &Path| std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let program = place.path("right-reset");
    std::fs::copy(env!("CARGO_BIN_EXE_right-reset"), &program).unwrap();
    std::fs::create_dir(place.path("model")).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        let copy = place.path("model").join(name);
        std::fs::copy(root().join("tests/tiny").join(name), &copy).unwrap();
        open(&copy);
    }
    open(&place.path("."));
    open(&program);
    std::fs::create_dir(place.path("theirs")).unwrap();
    std::fs::set_permissions(place.path("theirs"), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    for (what, arguments) in [
        ("a new cache", &["--output", "theirs/out", "--set", "cache.path=forbidden/cache"][..]),
        ("the cache of another user", &["--output", "theirs/out"]),
        ("an output folder of another user", &["--output", "first", "--set", "cache.path=theirs/cache"]),
    ] {
        let plain = place.command(&["run", "p.toml", "--set", "model.name=model"]);
        let mut command = Command::new(&program);
        command.args(plain.get_args()).args(arguments).current_dir(place.path(".")).stdin(Stdio::null());
        command.env("XDG_CACHE_HOME", place.path("theirs"));
        if rustix::process::geteuid().is_root() {
            command.uid(65_534).gid(65_534);
        } else {
            for folder in ["cache", "first/_right-reset"] {
                std::fs::set_permissions(place.path(folder), std::os::unix::fs::PermissionsExt::from_mode(0o555)).unwrap();
            }
        }
        std::fs::create_dir_all(place.path("forbidden")).unwrap();
        let out = done(command.output().unwrap());
        assert_eq!(out.code, 1, "{what}: {}", out.stderr);
        assert!(out.stderr.contains("permissions there") && out.stderr.contains("choose another place"), "{what}: {}", out.stderr);
    }
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.append(&mut files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

#[test]
fn flipped_bytes_in_the_cache_never_give_a_wrong_score() {
    let (place, expected) = workload();
    place.run(&PARQUET).ok();
    let mut dice = Dice::new(3);
    for round in 0..tries(25) {
        let all: Vec<PathBuf> = files(&place.path("cache/v2")).into_iter().filter(|f| !f.ends_with("lock")).collect();
        // Files as they are met: the logs hold nearly all bytes, snapshots and settings are small.
        let file = &all[dice.below(all.len() as u64) as usize];
        let mut bytes = std::fs::read(file).unwrap();
        if bytes.is_empty() {
            continue;
        }
        for _ in 0..=dice.below(20) {
            let at = dice.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << dice.below(8);
        }
        if dice.below(5) == 0 {
            bytes.truncate(dice.below(bytes.len() as u64) as usize);
        }
        std::fs::write(file, bytes).unwrap();
        let what = format!("round {round}, {}", file.display());
        // sled says on standard error that it panicked before the rescue; that is its own line, and the only one.
        let mut out = place.command(&[&["run", "p.toml", "--force"][..], &PARQUET].concat()).output().unwrap();
        if out.status.code() == Some(75) {
            assert!(String::from_utf8_lossy(&out.stderr).contains("run again"), "{what}");
            out = place.command(&[&["run", "p.toml", "--force"][..], &PARQUET].concat()).output().unwrap();
        }
        assert_eq!(out.status.code(), Some(0), "{what}:\n{}", String::from_utf8_lossy(&out.stderr));
        is_right(&place, &expected, &what);
    }
}

#[test]
fn a_torn_manifest_and_a_damaged_temporary_part_are_made_good() {
    let (place, expected) = workload();
    place.run(&PARQUET).ok();
    let manifest = place.path("out/_right-reset/manifest.jsonl");
    let mut dice = Dice::new(4);
    for round in 0..tries(12) {
        let bytes = std::fs::read(&manifest).unwrap();
        std::fs::write(&manifest, &bytes[..dice.below(bytes.len() as u64) as usize]).unwrap();
        place.run(&PARQUET).ok();
        is_right(&place, &expected, &format!("torn manifest, round {round}"));
    }
    std::fs::remove_dir_all(place.path("out")).unwrap();
    let status = place
        .command(&[&["run", "p.toml"][..], &PARQUET].concat())
        .env("FAILPOINTS", "before-rename=2*off->return")
        .output()
        .unwrap()
        .status;
    assert!(!status.success());
    let part = place.path("out/_right-reset/part-0.rr-tmp");
    let mut bytes = std::fs::read(&part).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    std::fs::write(&part, bytes).unwrap();
    place.run(&PARQUET).ok();
    is_right(&place, &expected, "damaged temporary part");
    // What is not a manifest is not taken for an empty one.
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replacen("{\"kind\"", "{kind", 1)).unwrap();
    place.run(&PARQUET).fails(1, "put the file back from a backup");
}

#[test]
fn a_second_process_is_told_who_holds_what() {
    let place = Place::with_documents(&prose(3000, 40));
    let mut first = place.command(&["run", "p.toml"]).stderr(Stdio::null()).spawn().unwrap();
    let began = Instant::now();
    while !(place.path("out/_right-reset/lock").exists() && place.path("cache/v2/shard-3").exists()) {
        assert!(began.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
    place.run(&["--output", "other"]).fails(75, "is in use by process").fails(75, "--set cache.path=DIR");
    place.run(&["--set", "cache.path=other"]).fails(75, "another run writes to this output folder");
    place.tool(&["plan", "p.toml"]).fails(75, "is in use by process");
    // It is stopped as an operator stops it.
    let pid = rustix::process::Pid::from_child(&first);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = first.wait().unwrap();
    assert_eq!(status.code(), Some(143));
    place.run(&[]).ok();
    assert_eq!(place.summary("out")["rows"]["chunked"], 3000);
    let ids: std::collections::BTreeSet<String> =
        place.chunks("out").iter().map(|c| format!("{}{}", c["doc_id"], c["chunk_index"])).collect();
    assert_eq!(ids.len() as u64, place.summary("out")["chunks"]["count"].as_u64().unwrap());
}
