use std::fs;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use safetensors::tensor::{SafeTensors, TensorView};
use safetensors::{Dtype, serialize};
use serde_json::json;

use super::super::fs::real;
use super::super::manifest::StoredDType;
use super::super::region::Region;
use super::super::tests::folder::Folder;
use super::header::ALIGNMENT;
use super::*;

fn dtype(dtype: Dtype) -> StoredDType {
    dtype.try_into().unwrap()
}

impl Folder {
    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.0.join(name), bytes).unwrap();
        self.0.join(name)
    }

    fn open(&self, name: &str) -> Result<(PathBuf, Manifest), CheckpointError> {
        open(&*real(), &self.0.join(name), 3)
    }
}

#[test]
fn the_crate_reads_files_that_begin_with_our_header() {
    let tensors = [
        ("a".to_owned(), dtype(Dtype::U8), vec![3]),
        ("model.b[0:2,1:3]".to_owned(), dtype(Dtype::F64), vec![2, 2]),
        ("scalar \"\u{e9}\"".to_owned(), dtype(Dtype::BF16), vec![]),
        ("empty".to_owned(), dtype(Dtype::F32), vec![4, 0]),
        ("last".to_owned(), dtype(Dtype::F8_E5M2), vec![5]),
    ];
    let metadata = BTreeMap::from([
        ("format".to_owned(), "pt".to_owned()),
        ("b".to_owned(), "2".to_owned()),
    ]);
    let (mut bytes, begins) = header(&tensors, &metadata);
    let begin = bytes.len();
    assert!(begin.is_multiple_of(ALIGNMENT));
    assert_eq!(
        begins.iter().map(|at| *at as usize - begin).collect_vec(),
        [0, 3, 35, 37, 37]
    );
    bytes.extend(0..42);
    let read = SafeTensors::deserialize(&bytes).unwrap();
    for ((name, dtype, shape), at) in tensors.iter().zip(&begins) {
        let view = read.tensor(name).unwrap();
        assert_eq!(
            (view.dtype(), view.shape()),
            (dtype.safetensors(), &shape[..]),
            "{name}"
        );
        assert_eq!(
            view.data().as_ptr(),
            bytes[*at as usize..].as_ptr(),
            "{name}"
        );
    }
    let (_, found) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(
        found
            .metadata()
            .clone()
            .unwrap()
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        metadata
    );
    assert_eq!(
        header(&tensors, &metadata).0,
        bytes[..begin],
        "the same every time"
    );

    // And so do we.
    let folder = Folder::new("safetensors-own");
    folder.write("x.safetensors", &bytes);
    let (dir, manifest) = folder.open("x.safetensors").unwrap();
    assert_eq!(
        (dir, &manifest.files[..]),
        (
            folder.0.clone(),
            &[FileEntry::new("x.safetensors", bytes.len() as u64)][..]
        )
    );
    for ((name, dtype, shape), at) in tensors.iter().zip(begins) {
        let entry = &manifest.tensors[name];
        assert_eq!((entry.dtype, &entry.shape), (*dtype, shape), "{name}");
        let chunks = entry
            .chunks
            .iter()
            .map(|chunk| (chunk.region.clone(), chunk.begin))
            .collect_vec();
        assert_eq!(
            chunks,
            if name == "empty" {
                vec![]
            } else {
                vec![(Region::full(shape), at)]
            },
            "{name}"
        );
    }
}

#[test]
#[should_panic(expected = "names of a header differ: [\"a\"]")]
fn two_tensors_of_one_name_are_a_bug_of_the_caller() {
    header(
        &[
            ("a".into(), dtype(Dtype::U8), vec![1]),
            ("a".into(), dtype(Dtype::U8), vec![2]),
        ],
        &BTreeMap::new(),
    );
}

/// Returns a file as the crate writes it, of tensors that are all zeros.
fn file(tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let zeros = vec![0; 1000];
    let views = tensors.iter().map(|(name, shape)| {
        let bytes = 4 * shape.iter().product::<usize>();
        (
            *name,
            TensorView::new(Dtype::F32, shape.to_vec(), &zeros[..bytes]).unwrap(),
        )
    });
    serialize(views, None).unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn the_name_of_a_file_may_be_any_bytes() {
    use std::os::unix::ffi::OsStrExt;

    let folder = Folder::new("safetensors-bytes");
    // The one that has the other's name as text is not taken for it.
    let [other, same_text] = [
        &b"model-\xff.safetensors"[..],
        "model-\u{fffd}.safetensors".as_bytes(),
    ];
    for (name, tensors) in [
        (other, &[("a", &[2, 3][..])][..]),
        (same_text, &[("b", &[5])]),
    ] {
        fs_err::write(
            folder.0.join(std::ffi::OsStr::from_bytes(name)),
            file(tensors),
        )
        .unwrap();
    }
    let (dir, manifest) = open(
        &*real(),
        &folder.0.join(std::ffi::OsStr::from_bytes(other)),
        0,
    )
    .unwrap();
    assert_eq!(
        (&dir, manifest.tensors["a"].shape.as_slice()),
        (&folder.0, &[2, 3][..])
    );
    assert_eq!(
        manifest.files[0].path(&dir).file_name().unwrap().as_bytes(),
        other
    );
}

#[test]
fn models_in_one_file_and_in_several() {
    let folder = Folder::new("safetensors-several");
    folder.write("model.safetensors", file(&[("a", &[2, 3]), ("b", &[])]));
    let keys = |(_, manifest): (PathBuf, Manifest)| {
        manifest
            .tensors
            .iter()
            .map(|(key, entry)| {
                (
                    key.clone(),
                    manifest.files[entry.chunks[0].file].name.clone(),
                )
            })
            .collect_vec()
    };
    let pair = |key: &str, file: &str| (key.to_owned(), file.to_owned());
    let single = [
        pair("a", "model.safetensors"),
        pair("b", "model.safetensors"),
    ];
    assert_eq!(keys(folder.open("").unwrap()), single);
    assert_eq!(keys(folder.open("model.safetensors").unwrap()), single);

    // The index decides which of two tensors of one name is meant.
    folder.write("1.safetensors", file(&[("a", &[2]), ("c", &[1])]));
    folder.write("2.safetensors", file(&[("a", &[5]), ("d", &[1])]));
    let index = |map: serde_json::Value| {
        json!({ "metadata": { "total_size": 0 }, "weight_map": map }).to_string()
    };
    folder.write(
        INDEX,
        index(json!({ "a": "2.safetensors", "c": "1.safetensors", "d": "2.safetensors" })),
    );
    let several = [
        pair("a", "2.safetensors"),
        pair("c", "1.safetensors"),
        pair("d", "2.safetensors"),
    ];
    assert_eq!(folder.open("").unwrap().1.tensors["a"].shape, [5]);
    assert_eq!(keys(folder.open("").unwrap()), several);
    assert_eq!(keys(folder.open(INDEX).unwrap()), several);

    folder.write(
        INDEX,
        index(json!({ "a": "1.safetensors", "d": "2.safetensors" })),
    );
    assert_eq!(folder.open("").unwrap().1.tensors["a"].shape, [2]);
    assert_eq!(
        keys(folder.open("").unwrap()),
        [pair("a", "1.safetensors"), pair("d", "2.safetensors")]
    );

    let wrong = [
        (
            index(json!({ "a": "../several/2.safetensors" })),
            "\"../several/2.safetensors\" is not the name of a file",
        ),
        (
            index(json!({ "a": "/dev/zero" })),
            "\"/dev/zero\" is not the name",
        ),
        (index(json!({ "a": ".." })), "\"..\" is not the name"),
        (
            index(json!({ "x": "2.safetensors" })),
            "it names `2.safetensors` for `x`, which that file does not have",
        ),
        (
            index(json!({ "d": "1.safetensors" })),
            "it names `1.safetensors` for `d`",
        ),
        (
            r#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#.into(),
            "two values for the key `a`",
        ),
        ("{}".into(), "missing field `weight_map`"),
        ("[".repeat(100_000), "invalid type"),
    ];
    for (text, expected) in wrong {
        let path = folder.write(INDEX, text);
        let error = folder.open("").unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Safetensors { path: of, reason } if *of == path && reason.contains(expected)),
            "{error}"
        );
    }
    folder.write(INDEX, index(json!({ "a": "3.safetensors" })));
    assert!(
        matches!(folder.open(""), Err(CheckpointError::Io { rank: 3, path, .. }) if path.ends_with("3.safetensors"))
    );
}

/// Returns a file with this JSON and `data` bytes of data.
fn of_json(json: &str, data: usize) -> Vec<u8> {
    [
        &(json.len() as u64).to_le_bytes(),
        json.as_bytes(),
        &vec![0; data],
    ]
    .concat()
}

#[test]
fn damaged_files_are_refused() {
    let folder = Folder::new("safetensors-damaged");
    let tensor = |begin: u64, end: u64| {
        format!(
            r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#,
            end.wrapping_sub(begin)
        )
    };
    let one = |shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let good = one("[2]", "[0,8]");
    assert_eq!(
        parse_header(good.as_bytes(), 8 + good.len() as u64 + 8, 0)
            .unwrap()
            .len(),
        1
    );
    let cases = [
        ("empty", Vec::new(), "0 bytes"),
        ("ends in the length", vec![1; 7], "7 bytes"),
        (
            "ends in the header",
            of_json(&good, 0)[..20].to_vec(),
            "header has",
        ),
        (
            "huge header",
            [u64::MAX.to_le_bytes(), [0; 8]].concat(),
            "header has 18446744073709551615",
        ),
        ("ends in the data", of_json(&good, 7), "header and data are"),
        (
            "bytes after the data",
            of_json(&good, 9),
            "header and data are",
        ),
        ("not JSON", of_json("{", 0), "EOF"),
        (
            "not UTF-8",
            of_json("", 0).into_iter().chain([0xff]).collect(),
            "EOF",
        ),
        ("not a map", of_json("[]", 0), "invalid type"),
        (
            "deep",
            of_json(&format!(r#"{{"__metadata__":{}"#, "[".repeat(100_000)), 0),
            "EOF while parsing",
        ),
        (
            "twice",
            of_json(
                &format!(r#"{{"a":{},"a":{}}}"#, tensor(0, 4), tensor(0, 4)),
                4,
            ),
            "two tensors `a`",
        ),
        (
            "overlap",
            of_json(
                &format!(r#"{{"a":{},"b":{}}}"#, tensor(0, 4), tensor(3, 6)),
                6,
            ),
            "invalid offset for tensor `b`",
        ),
        (
            "gap",
            of_json(
                &format!(r#"{{"a":{},"b":{}}}"#, tensor(0, 4), tensor(5, 6)),
                6,
            ),
            "invalid offset for tensor `b`",
        ),
        (
            "does not begin at 0",
            of_json(&format!(r#"{{"a":{}}}"#, tensor(1, 4)), 4),
            "invalid offset for tensor `a`",
        ),
        (
            "backwards",
            of_json(&one("[2]", "[8,0]"), 8),
            "invalid offset",
        ),
        (
            "beyond the end",
            of_json(&one("[2]", "[0,16]"), 8),
            "invalid shape",
        ),
        (
            "huge offset",
            of_json(
                &one("[2305843009213693951]", "[0,2305843009213693951]").replace("F32", "U8"),
                8,
            ),
            "header and data",
        ),
        (
            "product overflows",
            of_json(&one("[4294967296,4294967296]", "[0,8]"), 8),
            "overflow",
        ),
        (
            "bytes overflow",
            of_json(&one("[4611686018427387904]", "[0,8]"), 8),
            "overflow",
        ),
        (
            "overflow apart from a 0",
            of_json(&one("[0,4294967296,4294967296]", "[0,0]"), 0),
            "larger than any memory",
        ),
        (
            "negative",
            of_json(&one("[-1]", "[0,8]"), 8),
            "invalid value",
        ),
        (
            "unknown dtype",
            of_json(&good.replace("F32", "F99"), 8),
            "unknown variant `F99`",
        ),
        (
            "half bytes",
            of_json(&one("[16]", "[0,8]").replace("F32", "F4"), 8),
            "`a`: elements of the dtype F4",
        ),
    ];
    for (name, bytes, expected) in cases {
        let path = folder.write("x.safetensors", bytes);
        let error = folder.open("x.safetensors").expect_err(name);
        assert!(
            matches!(&error, CheckpointError::Safetensors { path: of, reason } if *of == path && reason.contains(expected)),
            "{name}: {error}"
        );
    }
}

#[test]
fn a_header_above_the_limit_is_not_read() {
    let folder = Folder::new("safetensors-limit");
    let path = folder.write("x.safetensors", (LONGEST + 1).to_le_bytes());
    // Of which nothing is on the disk.
    fs::File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(2 * LONGEST)
        .unwrap();
    let error = folder.open("x.safetensors").unwrap_err().to_string();
    assert!(
        error.contains("its header has 100000001; at most 100000000 are read"),
        "{error}"
    );
}

#[test]
fn random_changes_of_a_header_never_panic() {
    let original = r#"{"__metadata__":{"a":"b"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},"c":{"dtype":"I64","shape":[0,7],"data_offsets":[26,26]}}"#;
    let mut valid = 0;
    let digits = original
        .bytes()
        .positions(|byte| byte.is_ascii_digit())
        .collect_vec();
    for seed in 0..20_000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let mut json = original.as_bytes().to_vec();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(0..json.len());
            match random.random_range(0..6) {
                0 => json[at] ^= 1 << random.random_range(0..8),
                1 => json.insert(at, random.random()),
                2 => _ = json.remove(at),
                _ => {
                    json[digits[random.random_range(0..digits.len())].min(at)] =
                        random.random_range(b'0'..=b'9')
                }
            }
        }
        let len = 8 + json.len() as u64 + 26;
        let Ok(tensors) = parse_header(&json, len, 0) else {
            continue;
        };
        valid += 1;
        let mut ends = vec![8 + json.len() as u64];
        for entry in tensors.values() {
            let ranges = entry.chunks.iter().map(|chunk| chunk.bytes(entry.dtype));
            assert!(ranges.clone().all(|range| range.end <= len), "seed {seed}");
            ends.extend(ranges.map(|range| range.end));
        }
        assert_eq!(ends.into_iter().max(), Some(len), "seed {seed}");
    }
    assert!(valid > 200, "{valid} were valid");
}
