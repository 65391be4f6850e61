//! Checked-in schemas, versions and help texts equal the code.

use crate::tool::{Place, root};

#[test]
fn schema_files_equal_the_code() {
    let place = Place::new();
    for name in ["pipeline", "chunks", "edges", "summary", "manifest"] {
        let printed = place.tool(&["schema", name]).ok().stdout;
        let file = root().join(format!("schemas/{name}.schema.json"));
        let stored = std::fs::read(&file).unwrap();
        assert!(printed == stored, "{} is out of date: right-reset schema {name} > {}", file.display(), file.display());
    }
}

#[test]
fn every_pipeline_key_has_a_description() {
    let text = std::fs::read_to_string(root().join("schemas/pipeline.schema.json")).unwrap();
    let schema: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut keys = 0;
    for (table, definition) in schema["$defs"].as_object().unwrap() {
        for (key, property) in definition["properties"].as_object().into_iter().flatten() {
            assert!(property["description"].as_str().is_some_and(|d| d.len() > 10), "{table}.{key}");
            keys += 1;
        }
    }
    assert!(keys > 35, "{keys}");
}

#[test]
fn versions_in_cache_keys_are_those_linked() {
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let linked = |name: &str| {
        let at = lock.find(&format!("name = \"{name}\"\nversion = \"")).unwrap();
        lock[at..].split('"').nth(3).unwrap().to_owned()
    };
    assert_eq!(right_reset::text::TOKENIZERS_VERSION, linked("tokenizers"));
    let segmenter = right_reset::text::SEGMENTER_VERSION;
    for name in ["icu_segmenter", "icu_segmenter_data", "icu_properties_data"] {
        assert!(segmenter.contains(&format!("{name} {}", linked(name))), "{name} {} is not in {segmenter:?}", linked(name));
    }
}

#[test]
fn help_is_the_checked_in_one() {
    let place = Place::new();
    let mut text = String::new();
    for command in [
        &[][..],
        &["run"],
        &["plan"],
        &["status"],
        &["score"],
        &["sweep"],
        &["view"],
        &["show"],
        &["mechanism"],
        &["sections"],
        &["streams", "build"],
        &["calibrate"],
        &["eval"],
        &["models"],
        &["cache"],
        &["cache", "prune"],
        &["schema"],
        &["completions"],
    ] {
        let help = place.command(&[command, &["--help"]].concat()).env("COLUMNS", "120").output().unwrap();
        text += &format!("$ right-reset {} --help\n{}\n", command.join(" "), String::from_utf8(help.stdout).unwrap());
    }
    let file = root().join("tests/help.txt");
    if std::env::var_os("RIGHT_RESET_WRITE_HELP").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    assert!(std::fs::read_to_string(&file).unwrap() == text, "tests/help.txt is out of date; RIGHT_RESET_WRITE_HELP=1 writes it anew");
}
