//! Hostile bytes without coverage as a guide: the corpus, random changes of it, and inputs that aim
//! at memory.

use std::path::Path;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Returns the corpus of a target.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    let mut paths: Vec<_> = folder
        .read_dir()
        .expect("a corpus")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    paths
        .iter()
        .map(|path| std::fs::read(path).expect("an input"))
        .collect()
}

fn change(bytes: &mut Vec<u8>, other: &[u8], random: &mut StdRng) {
    if bytes.is_empty() {
        return bytes.push(random.random());
    }
    let at = random.random_range(0..bytes.len());
    let until = random.random_range(at..bytes.len().min(at + 60)) + 1;
    match random.random_range(0..8) {
        0 => bytes[at] ^= 1 << random.random_range(0..8),
        1 => bytes.insert(at, random.random()),
        2 => drop(bytes.drain(at..until)),
        3 => {
            let copy = bytes[at..until].to_vec();
            bytes.splice(at..at, copy).for_each(drop);
        }
        4 => {
            let from = random.random_range(0..other.len().max(1)).min(other.len());
            bytes
                .splice(
                    at..until,
                    other[from..other.len().min(from + 60)].iter().copied(),
                )
                .for_each(drop);
        }
        _ => {
            if let Some(digit) = bytes[at..].iter_mut().find(|byte| byte.is_ascii_digit()) {
                *digit = random.random_range(b'0'..=b'9');
            }
        }
    }
}

/// Runs a target on its corpus and on random changes, and returns how many inputs were valid.
fn run(target: &str, parse: fn(&[u8]) -> bool) -> (usize, usize) {
    let corpus = corpus(target);
    let valid = corpus.iter().filter(|bytes| parse(bytes)).count();
    let mut changed = 0;
    for seed in 0..50_000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let [from, other] = [0, 1].map(|_| random.random_range(0..corpus.len()));
        let mut bytes = corpus[from].clone();
        for _ in 0..random.random_range(1..6) {
            change(&mut bytes, &corpus[other], random);
        }
        changed += usize::from(parse(&bytes));
    }
    (valid, changed)
}

#[test]
fn manifests() {
    let (valid, changed) = run("manifest", checkpoint_fuzz::manifest);
    assert!(
        valid >= 4 && changed > 1000,
        "{valid} of the corpus and {changed} changed ones were valid"
    );
}

#[test]
fn headers() {
    let (valid, changed) = run("header", checkpoint_fuzz::header);
    assert!(
        valid >= 3 && changed > 1000,
        "{valid} of the corpus and {changed} changed ones were valid"
    );
}

/// Inputs whose JSON has as many values as possible for its length. None may take more memory than
/// the targets allow.
#[test]
fn inputs_that_aim_at_memory() {
    let contents = |tensors: &str, values: &str, rank_values: &str, files: &str, mesh: &str| {
        format!(
            r#"{{"step":null,"software":"","mesh":{{"shape":[{mesh}],"names":[]}},"files":[{files}],"tensors":{{{tensors}}},"values":{{{values}}},"rank_values":{{{rank_values}}}}}"#
        )
    };
    let many = |text: &str, count: usize| {
        (0..count)
            .map(|at| text.replace('#', &at.to_string()))
            .collect::<Vec<_>>()
            .join(",")
    };
    // Just above a power of two, a vector is half empty.
    for count in [10, 1025, 32_769] {
        let tensor = |shape: &str, chunk: &str, count| {
            format!(
                r#""a":{{"shape":[{shape}],"dtype":"U8","placements":"","chunks":[{}]}}"#,
                many(chunk, count)
            )
        };
        let ones = many("1", count);
        let dims = many("1", count.isqrt());
        let digits = "0".repeat(16 * count);
        let inputs = [
            contents(
                &many(
                    r##""#":{"shape":[],"dtype":"U8","placements":"","chunks":[]}"##,
                    count,
                ),
                "",
                "",
                "",
                "",
            ),
            contents(
                &many(
                    r##""#":{"shape":[0],"dtype":"U8","placements":"","chunks":[]}"##,
                    count,
                ),
                "",
                "",
                "",
                "",
            ),
            contents(
                &tensor("", r#"[[],[],0,0,""]"#, count),
                "",
                "",
                r#"{"name":"a","len":1}"#,
                "",
            ),
            contents(
                &tensor(
                    &dims,
                    &format!(r#"[[{dims}],[{dims}],0,0,""]"#),
                    count.isqrt(),
                ),
                "",
                "",
                "",
                "",
            ),
            contents(
                &format!(
                    r#""a":{{"shape":[],"dtype":"U8","placements":"","chunks":[[[],[],0,0,"{digits}"]]}}"#
                ),
                "",
                "",
                "",
                "",
            ),
            contents(
                &format!(r#""a":{{"shape":[{ones}],"dtype":"U8","placements":"","chunks":[]}}"#),
                "",
                "",
                "",
                "",
            ),
            contents("", &many(r##""#":"""##, count), "", "", ""),
            contents("", "", &many(r##""#":[]"##, count), "", ""),
            contents("", "", &format!(r#""":[{}]"#, many(r#""""#, count)), "", ""),
            contents("", "", "", &many(r##"{"name":"#","len":1}"##, count), ""),
            contents("", "", "", &many(r#"{"name":"","len":1}"#, count), ""),
            contents("", "", "", "", &ones),
            format!("[{}]", many("[]", count)),
            "[".repeat(count),
            r#"{"":"#.repeat(count),
        ];
        for input in inputs {
            checkpoint_fuzz::manifest(input.as_bytes());
        }
        let tensor = |shape: &str| {
            format!(r##""#":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}"##)
        };
        let inputs = [
            format!("{{{}}}", many(&tensor("0"), count)),
            format!("{{{}}}", tensor(&many("0", count))),
            format!(r#"{{"__metadata__":{}"#, "[".repeat(count)),
            format!(r#"{{"weight_map":{{{}}}}}"#, many(r##""#":"""##, count)),
            format!(r#"{{"x":[{}],"weight_map":{{}}}}"#, many("0", count)),
        ];
        for input in inputs {
            checkpoint_fuzz::header(&[&[0, 0], input.as_bytes()].concat());
        }
    }
}
