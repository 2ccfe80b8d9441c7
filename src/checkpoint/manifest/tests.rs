pub(crate) mod rules;

use std::collections::BTreeSet;

use itertools::Itertools;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use rules::assert_valid;

fn chunk(
    offsets: &[usize],
    shape: &[usize],
    file: usize,
    begin: u64,
    checksums: &[u64],
) -> ChunkEntry {
    let region = Region {
        offsets: offsets.to_vec(),
        shape: shape.to_vec(),
    };
    ChunkEntry {
        region,
        file,
        begin,
        checksums: checksums.to_vec(),
    }
}

fn tensor(shape: &[usize], dtype: safetensors::Dtype, chunks: &[ChunkEntry]) -> TensorEntry {
    let dtype = dtype.try_into().unwrap();
    TensorEntry {
        shape: shape.to_vec(),
        dtype,
        placements: "[Shard(0)]".into(),
        chunks: chunks.to_vec(),
    }
}

/// Two files, and tensors of every kind: divided, larger than a block, without dimensions, and
/// without elements.
fn example() -> Manifest {
    use safetensors::Dtype::*;

    let file = |name: &str, len| FileEntry::new(name, len);
    let halves = [
        chunk(&[0, 0], &[2, 3], 0, 100, &[1]),
        chunk(&[2, 0], &[1, 3], 1, 8, &[u64::MAX]),
    ];
    let tensors = [
        ("a", tensor(&[3, 3], F32, &halves)),
        (
            "b",
            tensor(&[1 << 18], F64, &[chunk(&[0], &[1 << 18], 1, 64, &[3, 4])]),
        ),
        (
            "scalar \"\u{e9}\"",
            tensor(&[], BF16, &[chunk(&[], &[], 0, 124, &[5])]),
        ),
        ("empty", tensor(&[0, 7], BOOL, &[])),
    ];
    Manifest {
        step: Some(100),
        required_features: Vec::new(),
        software: "burn-dtensor 0.1.0".into(),
        mesh: MeshEntry {
            shape: vec![2, 1],
            names: vec!["shard".into(), "tp".into()],
        },
        files: vec![
            file("rank-00000.safetensors", 126),
            file("rank-00001.safetensors", 64 + (2 << 20)),
        ],
        tensors: tensors.map(|(key, tensor)| (key.into(), tensor)).into(),
        values: [("scheduler".into(), "03".into())].into(),
        rank_values: [("random".into(), vec!["04".into(), "05".into()])].into(),
    }
}

/// Returns the contents in their frame, with the right checksum.
fn framed(contents: &str) -> Vec<u8> {
    let checksum = XxHash3_64::oneshot(contents.as_bytes());
    format!("{BEFORE_VERSION}1{BEFORE_CHECKSUM}{checksum:016x}{BEFORE_CONTENTS}{contents}}}\n")
        .into_bytes()
}

fn contents(manifest: &Manifest) -> String {
    frame(&manifest.to_bytes()).unwrap().2.to_owned()
}

#[test]
fn what_is_written_is_read() {
    let manifest = example();
    manifest.validate(true).unwrap();
    assert_valid(&manifest);
    let bytes = manifest.to_bytes();
    assert_eq!(Manifest::parse(&bytes), Ok(manifest));
    // The frame is JSON as well, for other programs.
    let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(
        json["manifest"]["tensors"]["b"]["chunks"][0][4],
        "00000000000000030000000000000004"
    );
    assert_eq!(
        json["checksum"],
        format!(
            "{:016x}",
            XxHash3_64::oneshot(contents(&example()).as_bytes())
        )
    );
}

#[test]
fn bytes_that_changed_are_found() {
    let bytes = example().to_bytes();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        Manifest::parse(&changed).unwrap_err();
        Manifest::parse(&bytes[..at]).unwrap_err();
    }
    assert_eq!(
        Manifest::parse(&[&bytes[..], b"\n"].concat()),
        Err(ManifestError::Frame)
    );
    for (version, remedy) in [(2, "Use a newer one"), (0, "There is no such version")] {
        let other = String::from_utf8(bytes.clone()).unwrap().replacen(
            r#""version":1"#,
            &format!(r#""version":{version}"#),
            1,
        );
        let error = Manifest::parse(other.as_bytes()).unwrap_err();
        let expected = ManifestError::Version {
            found: version,
            known: 1,
        };
        assert_eq!(error, expected);
        assert!(error.to_string().contains(remedy), "{error}");
    }
    let stored = frame(&example().to_bytes()).unwrap().1;
    let changed = String::from_utf8(example().to_bytes())
        .unwrap()
        .replace("Shard(0)", "Shard(1)");
    let error = Manifest::parse(changed.as_bytes()).unwrap_err();
    assert!(
        matches!(error, ManifestError::Checksum { stored: s, found } if s == stored && s != found),
        "{error}"
    );
}

/// The names of the variants, except for `Frame`, `Version`, `Feature` and `Checksum`.
fn kind(error: &ManifestError) -> &'static str {
    match error {
        ManifestError::Json { .. } => "Json",
        ManifestError::FileName { .. } => "FileName",
        ManifestError::Mesh { .. } => "Mesh",
        ManifestError::Shape { .. } => "Shape",
        ManifestError::OutOfBounds { .. } => "OutOfBounds",
        ManifestError::Coverage { .. } => "Coverage",
        ManifestError::Overlap { .. } => "Overlap",
        ManifestError::Range { .. } => "Range",
        ManifestError::Shared { .. } => "Shared",
        ManifestError::Checksums { .. } => "Checksums",
        ManifestError::RankValues { .. } => "RankValues",
        ManifestError::Frame
        | ManifestError::Version { .. }
        | ManifestError::Feature { .. }
        | ManifestError::Checksum { .. } => "frame",
    }
}

const KINDS: [&str; 11] = [
    "Json",
    "FileName",
    "Mesh",
    "Shape",
    "OutOfBounds",
    "Coverage",
    "Overlap",
    "Range",
    "Shared",
    "Checksums",
    "RankValues",
];

#[test]
#[rustfmt::skip]
fn what_breaks_a_rule_is_refused_with_that_rule() {
    type Damage = fn(&mut Manifest);
    fn a(manifest: &mut Manifest) -> &mut TensorEntry { manifest.tensors.get_mut("a").unwrap() }
    fn empty(manifest: &mut Manifest, shape: &[usize]) { manifest.tensors.get_mut("empty").unwrap().shape = shape.into() }
    let damages: &[(&str, &str, Damage)] = &[
        ("FileName", "up", |m| m.files[0].name = "..".into()),
        ("FileName", "up and down", |m| m.files[0].name = "../rank-00000.safetensors".into()),
        ("FileName", "absolute", |m| m.files[0].name = "/etc/passwd".into()),
        ("FileName", "of Windows", |m| m.files[0].name = "C:\\x".into()),
        ("FileName", "no name", |m| m.files[0].name = String::new()),
        ("FileName", "a zero", |m| m.files[0].name = "a\0".into()),
        ("FileName", "not ASCII", |m| m.files[0].name = "\u{e9}".into()),
        ("FileName", "twice", |m| m.files[1].name = m.files[0].name.clone()),
        ("Mesh", "product overflows", |m| m.mesh.shape = vec![1 << 32, 1 << 32]),
        ("Mesh", "no ranks", |m| m.mesh.shape = vec![2, 0]),
        ("Mesh", "a name too many", |m| m.mesh.shape = vec![2]),
        ("Shape", "product overflows", |m| a(m).shape = vec![1 << 32, 1 << 32]),
        ("Shape", "bytes overflow", |m| a(m).shape = vec![1 << 62, 1]),
        ("Shape", "more than an address", |m| a(m).shape = vec![1 << 61, 1]),
        ("Shape", "overflows after a 0", |m| empty(m, &[0, 1 << 32, 1 << 32])),
        ("Shape", "overflows before a 0", |m| empty(m, &[1 << 32, 1 << 32, 0])),
        ("OutOfBounds", "one row too many", |m| a(m).chunks[1].region.shape[0] = 2),
        ("OutOfBounds", "offset beyond the end", |m| a(m).chunks[1].region.offsets[0] = 4),
        ("OutOfBounds", "end overflows", |m| a(m).chunks[1].region.offsets[0] = usize::MAX),
        ("OutOfBounds", "huge", |m| a(m).chunks[1].region.shape[0] = usize::MAX),
        ("OutOfBounds", "empty", |m| a(m).chunks[1].region.shape[0] = 0),
        ("OutOfBounds", "a dimension too few", |m| _ = a(m).chunks[1].region.shape.pop()),
        ("OutOfBounds", "an offset too many", |m| a(m).chunks[1].region.offsets.push(0)),
        ("OutOfBounds", "a chunk of nothing", |m| { let chunk = chunk(&[0, 0], &[1, 1], 0, 0, &[0]); m.tensors.get_mut("empty").unwrap().chunks.push(chunk) }),
        ("Coverage", "a chunk too few", |m| _ = a(m).chunks.pop()),
        ("Coverage", "a row too few", |m| a(m).chunks[0].region.shape[0] = 1),
        ("Coverage", "no chunk of a scalar", |m| m.tensors.values_mut().find(|t| t.shape.is_empty()).unwrap().chunks.clear()),
        ("Overlap", "the same row", |m| a(m).chunks[1].region.offsets[0] = 1),
        ("Overlap", "twice", |m| { let twice = a(m).chunks[1].clone(); a(m).chunks.push(twice) }),
        ("Range", "no such file", |m| a(m).chunks[0].file = 2),
        ("Range", "no such file at all", |m| a(m).chunks[0].file = usize::MAX),
        ("Range", "beyond the end", |m| m.files[1].len -= 1),
        ("Range", "a file of nothing", |m| m.files[0].len = 0),
        ("Range", "end overflows", |m| a(m).chunks[0].begin = u64::MAX),
        ("Shared", "one byte", |m| a(m).chunks[0].begin = 101),
        ("Shared", "a tensor as another", |m| m.tensors.values_mut().last().unwrap().chunks[0].begin = 100),
        ("Checksums", "one too few", |m| a(m).chunks[0].checksums.clear()),
        ("Checksums", "one too many", |m| a(m).chunks[0].checksums.push(0)),
        ("Checksums", "one for two blocks", |m| _ = m.tensors.get_mut("b").unwrap().chunks[0].checksums.pop()),
        ("RankValues", "one too few", |m| _ = m.rank_values.get_mut("random").unwrap().pop()),
        ("RankValues", "none", |m| m.rank_values.get_mut("random").unwrap().clear()),
    ];
    let mut found = BTreeSet::from(["Json"]);
    for (expected, name, damage) in damages {
        let mut manifest = example();
        damage(&mut manifest);
        let error = Manifest::parse(&manifest.to_bytes()).expect_err(name);
        assert_eq!(kind(&error), *expected, "{name}: {error}");
        found.insert(expected);
    }
    assert_eq!(found, KINDS.into(), "each rule has an example");
}

/// Later versions may add fields, and name those without which a checkpoint cannot be read.
#[test]
fn fields_that_are_not_known_are_ignored_unless_they_are_required() {
    let with = |fields: &str| {
        let contents =
            contents(&example()).replacen(r#""step":100"#, &format!(r#"{fields},"step":100"#), 1);
        Manifest::parse(&framed(&contents))
    };
    // `previous` is a field of checkpoints that earlier versions wrote.
    for fields in [
        r#""later":{"a":[1]}"#,
        r#""previous":[90,18446744073709551615]"#,
        r#""required_features":[]"#,
    ] {
        assert_eq!(with(fields), Ok(example()), "{fields}");
    }
    let deep = contents(&example()).replacen(r#""shape":"#, r#""later":1,"shape":"#, 3);
    assert_eq!(Manifest::parse(&framed(&deep)), Ok(example()));
    let error = with(r#""required_features":["compression"],"tensors":"compressed""#).unwrap_err();
    let feature = "compression".into();
    assert_eq!(error, ManifestError::Feature { feature });
    assert!(error.to_string().contains("Use a newer one"), "{error}");
}

#[test]
fn contents_that_are_not_a_manifest_are_refused() {
    let contents = contents(&example());
    let deep = |open: &str| format!(r#""scheduler":{}"#, open.repeat(100_000));
    let tensor = r#""empty":{"shape":[0,7],"dtype":"BOOL","placements":"[Shard(0)]","chunks":[]}"#;
    let damages = [
        (
            "two tensors",
            tensor,
            format!("{tensor},{tensor}"),
            "two values for the key `empty`",
        ),
        (
            "two of a field",
            r#""step":100"#,
            r#""step":100,"step":100"#.into(),
            "duplicate field `step`",
        ),
        (
            "two values",
            r#""scheduler":"#,
            r#""scheduler":"","scheduler":"#.into(),
            "two values for the key `scheduler`",
        ),
        (
            "two of each",
            r#""random":["#,
            r#""random":[],"random":["#.into(),
            "two values for the key `random`",
        ),
        (
            "missing field",
            r#""software":"#,
            r#""softwares":"#.into(),
            "missing field `software`",
        ),
        (
            "no list of features",
            r#""step":100"#,
            r#""step":100,"required_features":1"#.into(),
            "invalid type",
        ),
        (
            "negative",
            "[[2,0],[1,3]",
            "[[-2,0],[1,3]".into(),
            "invalid value",
        ),
        (
            "larger than u64",
            "[[2,0],[1,3]",
            "[[18446744073709551616,0],[1,3]".into(),
            "invalid type",
        ),
        (
            "a fraction",
            "[[2,0],[1,3]",
            "[[2.0,0],[1,3]".into(),
            "invalid type",
        ),
        (
            "unknown dtype",
            r#""BOOL""#,
            r#""QFLOAT""#.into(),
            "unknown variant `QFLOAT`",
        ),
        (
            "half a byte",
            r#""BOOL""#,
            r#""F4""#.into(),
            "elements of the dtype F4 have a fraction of a byte",
        ),
        (
            "upper case",
            "ffffffffffffffff",
            "FFFFFFFFFFFFFFFF".into(),
            "16 hexadecimal digits",
        ),
        (
            "a sign",
            "ffffffffffffffff",
            "+fffffffffffffff".into(),
            "16 hexadecimal digits",
        ),
        (
            "15 digits",
            "ffffffffffffffff",
            "fffffffffffffff".into(),
            "16 hexadecimal digits",
        ),
        (
            "a longer chunk",
            r#""ffffffffffffffff"]"#,
            r#""ffffffffffffffff",0]"#.into(),
            "trailing characters",
        ),
        (
            "a shorter chunk",
            r#",1,8,"ffffffffffffffff"]"#,
            ",1,8]".into(),
            "invalid length 4",
        ),
        ("deep lists", r#""scheduler":"#, deep("["), "invalid type"),
        (
            "deep objects",
            r#""scheduler":"#,
            deep(r#"{"":"#),
            "invalid type",
        ),
        (
            "deep where none is",
            r#""step":100"#,
            format!(r#""step":{}"#, "[".repeat(100_000)),
            "invalid type",
        ),
    ];
    for (name, from, to, reason) in damages {
        assert!(contents.contains(from), "{name}");
        let error = Manifest::parse(&framed(&contents.replacen(from, &to, 1))).expect_err(name);
        assert!(
            matches!(&error, ManifestError::Json { reason: found } if found.contains(reason)),
            "{name}: {error}"
        );
    }
    for contents in ["", "{}", "[]", "null", "{", "{}}"] {
        assert_eq!(
            kind(&Manifest::parse(&framed(contents)).unwrap_err()),
            "Json",
            "{contents}"
        );
    }
}

/// Changes the contents at random, mostly numbers, so that what they mean is tested more than how
/// they are written.
fn mutate(contents: &mut Vec<u8>, random: &mut StdRng) {
    let at = random.random_range(0..contents.len());
    let until = random.random_range(at..contents.len().min(at + 80)) + 1;
    match random.random_range(0..10) {
        0 => contents[at] ^= 1 << random.random_range(0..8),
        1 => contents.insert(at, random.random()),
        2 => drop(contents.drain(at..until)),
        3 => {
            let copy = contents[at..until].to_vec();
            let to = random.random_range(0..=contents.len());
            contents.splice(to..to, copy).for_each(drop);
        }
        _ => {
            let digits = (0..contents.len())
                .filter(|&at| contents[at].is_ascii_digit())
                .collect_vec();
            if let Some(&at) = digits.get(random.random_range(0..digits.len().max(1))) {
                let digit = random.random_range(b'0'..=b'9');
                match random.random_range(0..4) {
                    0 => contents.splice(at..at, [digit]).for_each(drop),
                    1 => drop(contents.remove(at)),
                    _ => contents[at] = digit,
                }
            }
        }
    }
}

#[test]
fn random_changes_never_panic_and_what_is_read_follows_the_rules() {
    let mut valid = 0;
    let mut kinds = BTreeSet::new();
    let original = contents(&example()).into_bytes();
    for seed in 0..30_000 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut contents = original.clone();
        for _ in 0..random.random_range(1..5) {
            mutate(&mut contents, &mut random);
        }
        let checksum = XxHash3_64::oneshot(&contents);
        let frame = format!("{BEFORE_VERSION}1{BEFORE_CHECKSUM}{checksum:016x}{BEFORE_CONTENTS}")
            .into_bytes();
        match Manifest::parse(&[&frame, &contents[..], AFTER_CONTENTS.as_bytes()].concat()) {
            Ok(manifest) => {
                valid += 1;
                assert_valid(&manifest);
                assert_eq!(
                    Manifest::parse(&manifest.to_bytes()),
                    Ok(manifest),
                    "seed {seed}"
                );
            }
            Err(error) => _ = kinds.insert(kind(&error)),
        }
    }
    assert!(valid > 1000, "{valid} were valid");
    assert_eq!(
        kinds
            .difference(&["Shape", "frame"].into())
            .copied()
            .collect_vec()
            .len(),
        10,
        "{kinds:?}"
    );
}
