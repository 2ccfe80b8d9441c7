use std::collections::BTreeMap;
use std::fs;

use itertools::Itertools;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use safetensors::Dtype;

use super::super::fs::real;
use super::super::manifest::{
    ChunkEntry, FileEntry, MeshEntry, StoredDType, TensorEntry, block_checksums,
};
use super::super::read_plan::tests::{random_chunks, random_region};
use super::super::read_stats::{ClassStats, RunClass};
use super::super::region::Region;
use super::super::safetensors_file::header;
use super::super::tests::folder::Folder;
use super::*;

/// Returns the byte of a tensor at a position of its memory.
fn byte(key: &str, at: usize) -> u8 {
    let number = (at as u64 ^ (key.len() as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (number >> 56) as u8 ^ key.as_bytes()[0]
}

/// Returns the bytes of a region, from the tensor's definition.
fn bytes_of(key: &str, shape: &[usize], region: &Region, element: usize) -> Vec<u8> {
    let full = Region::full(shape);
    // Runs along the last dimension keep this fast enough without optimization.
    let Some((last, outer)) = region.shape.split_last() else {
        return (0..element).map(|at| byte(key, at)).collect();
    };
    let outer_len: usize = outer.iter().product();
    let mut bytes = Vec::with_capacity(outer_len * last * element);
    for mut index in 0..if *last == 0 { 0 } else { outer_len } {
        let mut first = region.clone();
        for dim in (0..outer.len()).rev() {
            first.offsets[dim] += index % outer[dim];
            index /= outer[dim];
        }
        let begin = full.offset_of(&first) * element;
        bytes.extend((begin..begin + last * element).map(|at| byte(key, at)));
    }
    bytes
}

/// Writes tensors, each split into these regions, into files in turn. Files are as those of a save.
fn write(
    folder: &Folder,
    files: usize,
    tensors: &[(&str, Dtype, Vec<usize>, Vec<Region>)],
) -> Manifest {
    let mut of_file = vec![Vec::new(); files];
    let mut manifest = Manifest {
        step: None,
        required_features: Vec::new(),
        software: String::new(),
        mesh: MeshEntry {
            shape: vec![],
            names: vec![],
        },
        files: Vec::new(),
        tensors: BTreeMap::new(),
        values: BTreeMap::new(),
        rank_values: BTreeMap::new(),
    };
    let mut count = 0;
    for (key, dtype, shape, regions) in tensors {
        let dtype: StoredDType = (*dtype).try_into().unwrap();
        let entry = TensorEntry {
            shape: shape.clone(),
            dtype,
            placements: String::new(),
            chunks: Vec::new(),
        };
        manifest.tensors.insert((*key).into(), entry);
        for region in regions {
            of_file[count % files].push((*key, dtype, region.clone()));
            count += 1;
        }
    }
    for (file, chunks) in of_file.into_iter().enumerate() {
        let name = |(key, dtype, region): &(&str, StoredDType, Region)| {
            (format!("{key}{region}"), *dtype, region.shape.clone())
        };
        let (mut bytes, begins) = header(&chunks.iter().map(name).collect_vec(), &BTreeMap::new());
        for ((key, dtype, region), begin) in chunks.into_iter().zip(begins) {
            let tensor = manifest.tensors.get_mut(key).unwrap();
            let data = bytes_of(key, &tensor.shape, &region, dtype.bytes());
            tensor.chunks.push(ChunkEntry {
                region,
                file,
                begin,
                checksums: block_checksums(&data),
            });
            bytes.extend(data);
        }
        let name = format!("{file}.safetensors");
        fs::write(folder.0.join(&name), &bytes).unwrap();
        manifest
            .files
            .push(FileEntry::new(name, bytes.len() as u64));
    }
    manifest.validate(true).unwrap();
    manifest
}

fn want(key: &str, region: Region) -> Want {
    Want {
        key: key.into(),
        region,
    }
}

/// Reads regions and compares them with the definition of the tensors.
fn check(folder: &Folder, manifest: &Manifest, wants: &[Want], options: &ReadOptions) -> ReadStats {
    let fs = real();
    let mut expected = 0;
    let read = Reader::new(&*fs, &folder.0, manifest, options, 7).read(wants, |index, bytes| {
        assert_eq!(index, expected, "in order");
        expected += 1;
        let Want { key, region } = &wants[index];
        let TensorEntry { shape, dtype, .. } = &manifest.tensors[key];
        assert!(
            bytes.as_ptr().addr().is_multiple_of(dtype.bytes()),
            "aligned"
        );
        assert!(
            *bytes == bytes_of(key, shape, region, dtype.bytes())[..],
            "{key}{region} with {options:?}"
        );
        Ok(())
    });
    assert_eq!(expected, wants.len());
    read.unwrap()
}

#[test]
fn regions_of_any_dtype_are_read() {
    use Dtype::*;

    let dtypes = [
        BOOL, U8, I8, F8_E4M3, I16, U16, F16, BF16, I32, U32, F32, C64, F64, I64, U64,
    ];
    let names = dtypes.iter().map(|dtype| format!("{dtype}")).collect_vec();
    let random = &mut StdRng::seed_from_u64(3);
    let shapes = [
        vec![],
        vec![7],
        vec![5, 9],
        vec![0, 3],
        vec![3, 4, 5],
        vec![1, 1],
    ];
    let tensor = |(name, dtype): (_, &Dtype)| {
        let shape = shapes[random.random_range(0..shapes.len())].clone();
        let chunks = if shape.contains(&0) {
            Vec::new()
        } else {
            random_chunks(&shape, random)
        };
        (name, *dtype, shape, chunks)
    };
    let tensors = names
        .iter()
        .map(String::as_str)
        .zip(&dtypes)
        .map(tensor)
        .collect_vec();
    let folder = Folder::new("reader-dtypes");
    let manifest = write(&folder, 3, &tensors);
    for round in 0..40 {
        let want = |(key, tensor): (&String, &TensorEntry)| {
            want(key, random_region(&tensor.shape, random))
        };
        let wants = manifest.tensors.iter().map(want).collect_vec();
        let options = ReadOptions::new()
            .with_threads(round % 4)
            .with_memory([0, 100, 1 << 30][round % 3]);
        let stats = check(&folder, &manifest, &wants, &options);
        let needed = wants
            .iter()
            .map(|want| want.region.num_elements() * manifest.tensors[&want.key].dtype.bytes());
        assert_eq!(stats.needed, needed.sum::<usize>() as u64);
    }
    assert_eq!(
        check(&folder, &manifest, &[], &ReadOptions::new()),
        ReadStats::default()
    );
}

/// Three matrices of several blocks, in uneven chunks in two files.
fn matrices(folder: &Folder) -> Manifest {
    let rows = |bounds: &[usize], columns| {
        bounds
            .iter()
            .tuple_windows()
            .map(|(&a, &b)| Region::of_slices(&[a..b, 0..columns]))
            .collect_vec()
    };
    let grid = [0..1000, 1000..1025]
        .into_iter()
        .cartesian_product([0..300, 300..1025]);
    let grid = grid.map(|(a, b)| Region::of_slices(&[a, b])).collect_vec();
    let tensors = [
        (
            "rows",
            Dtype::F32,
            vec![700, 1025],
            rows(&[0, 1, 350, 700], 1025),
        ),
        ("grid", Dtype::BF16, vec![1025, 1025], grid),
        (
            "full",
            Dtype::U8,
            vec![3, 1 << 20],
            vec![Region::full(&[3, 1 << 20])],
        ),
    ];
    write(folder, 2, &tensors)
}

#[test]
fn large_regions_are_read_in_bounded_memory() {
    let folder = Folder::new("reader-memory");
    let manifest = matrices(&folder);
    let full = |key: &str| want(key, Region::full(&manifest.tensors[key].shape));
    let wants = [
        full("rows"),
        want("rows", Region::of_slices(&[200..500, 0..1025])),
        want("rows", Region::of_slices(&[0..700, 3..517])),
        full("grid"),
        want("grid", Region::of_slices(&[990..1010, 10..1020])),
        full("full"),
        want("full", Region::of_slices(&[1..2, 100..(1 << 20) - 1])),
        want("full", Region::of_slices(&[0..3, 0..1])),
    ];
    let largest = 3 << 20;
    let total: usize = wants
        .iter()
        .map(|want| want.region.num_elements() * manifest.tensors[&want.key].dtype.bytes())
        .sum();
    for (memory, threads) in [(0, 4), (1, 1), (6 << 20, 3), (40 << 20, 4), (1 << 30, 8)] {
        let options = ReadOptions::new().with_memory(memory).with_threads(threads);
        let stats = check(&folder, &manifest, &wants, &options);
        let peak = stats.peak_memory as usize;
        assert!(
            peak <= memory.max(largest + (1 << 20)) && peak >= largest,
            "{peak} of {memory}"
        );
        assert!(
            memory < 1 << 30 || peak >= total,
            "all at once: {peak} of {total}"
        );
        assert_eq!(stats.needed, total as u64);
    }
    let options = ReadOptions::new();
    let stats = check(&folder, &manifest, &wants[6..7], &options);
    let contiguous = ClassStats {
        needed: (1 << 20) - 101,
        read: (1 << 20) - 101,
        block_rounding: 101,
    };
    assert_eq!(
        (stats.by_class, stats.reads),
        (BTreeMap::from([(RunClass::Contiguous, contiguous)]), 1)
    );
    let stats = check(&folder, &manifest, &[full("full")], &options);
    assert_eq!(
        (stats.read, stats.block_rounding, stats.reads),
        (3 << 20, 0, 1)
    );
    assert!(stats.to_string().starts_with(
        "3.0 MiB needed, 3.0 MiB read (1.000x), 0.0 MiB more for complete blocks, in 1 reads"
    ));
}

#[test]
fn one_changed_bit_in_any_block_is_found_and_named() {
    let folder = Folder::new("reader-corrupt");
    let manifest = matrices(&folder);
    let options = ReadOptions::new().with_threads(2);
    let mut blocks = 0;
    for (key, tensor) in &manifest.tensors {
        let wants = [want(key, Region::full(&tensor.shape))];
        for chunk in &tensor.chunks {
            let path = folder.0.join(&manifest.files[chunk.file].name);
            let original = fs::read(&path).unwrap();
            let bytes = chunk.bytes(tensor.dtype);
            for (index, _) in chunk.checksums.iter().enumerate() {
                let first = bytes.start + (index * BLOCK) as u64;
                let last = bytes.end.min(first + BLOCK as u64);
                let mut random = StdRng::seed_from_u64(blocks);
                let mut damaged = original.clone();
                damaged[random.random_range(first..last) as usize] ^=
                    1 << random.random_range(0..8);
                fs::write(&path, damaged).unwrap();
                let fs = real();
                let reader = Reader::new(&*fs, &folder.0, &manifest, &options, 7);
                let error = reader
                    .read(&wants, |_, _| panic!("damaged bytes are handed over"))
                    .unwrap_err();
                let key = key.clone();
                let path = path.clone();
                assert_eq!(
                    error,
                    CheckpointError::Corrupt {
                        path,
                        key,
                        first,
                        last
                    }
                );
                blocks += 1;
            }
            fs::write(&path, original).unwrap();
        }
        check(&folder, &manifest, &wants, &options);
    }
    assert!(blocks >= 9, "{blocks}");
}

#[test]
fn files_that_are_not_as_the_manifest_says() {
    let folder = Folder::new("reader-length");
    let manifest = matrices(&folder);
    let fs = real();
    let region = Region::of_slices(&[0..1, 0..1]);
    let read = |key: &str| {
        let reader = Reader::new(&*fs, &folder.0, &manifest, &ReadOptions::new(), 7);
        reader.read(&[want(key, region.clone())], |_, _| Ok(()))
    };
    let path = folder.0.join(&manifest.files[1].name);
    let file = fs_err::OpenOptions::new().write(true).open(&path).unwrap();
    let len = manifest.files[1].len;
    for found in [len - 1, len + 1, 0] {
        file.set_len(found).unwrap();
        let length = CheckpointError::Length {
            path: path.clone(),
            found,
            expected: len,
        };
        assert_eq!(read("full"), Err(length.clone()), "it is in this file");
        assert_eq!(
            read("rows").is_ok(),
            manifest.tensors["rows"].chunks[0].file == 0,
            "its first row is not"
        );
    }
    fs::remove_file(&path).unwrap();
    let is_named = |error: CheckpointError| {
        let CheckpointError::Io {
            rank: 7,
            action,
            path: of,
            reason,
        } = error
        else {
            panic!("{error}")
        };
        assert!(action == "open" && of == path && !reason.is_empty());
    };
    is_named(read("full").unwrap_err());
    // A link leads elsewhere, even if to a file with the right contents.
    fs::rename(
        folder.0.join(&manifest.files[0].name),
        folder.0.join("other"),
    )
    .unwrap();
    fs::write(&path, vec![0; len as usize]).unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("other", folder.0.join(&manifest.files[0].name)).unwrap();
        assert!(matches!(read("rows"), Err(CheckpointError::Io { .. })));
        let reader = Reader::new(&*fs, &folder.0, &manifest, &ReadOptions::new(), 7)
            .with_links(Links::Follow);
        reader
            .read(&[want("rows", region.clone())], |_, _| Ok(()))
            .unwrap();
    }
}

#[test]
fn a_failure_of_the_caller_ends_the_read() {
    let folder = Folder::new("reader-caller");
    let manifest = matrices(&folder);
    let wants =
        ["rows", "grid", "full"].map(|key| want(key, Region::full(&manifest.tensors[key].shape)));
    let fs = real();
    for memory in [0, 1 << 30] {
        let options = ReadOptions::new().with_memory(memory);
        let reader = Reader::new(&*fs, &folder.0, &manifest, &options, 7);
        let mut calls = 0;
        let read = reader.read(&wants, |index, _| {
            calls += 1;
            if index == 1 {
                Err(CheckpointError::NoStep)
            } else {
                Ok(())
            }
        });
        assert_eq!((read, calls), (Err(CheckpointError::NoStep), 2));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            reader.read(&wants, |_, _| panic!("planned"))
        }));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"planned"));
    }
}

#[test]
fn threads_that_do_not_start_are_an_error_unless_one_does() {
    use std::sync::atomic::AtomicUsize;

    static STARTED: AtomicUsize = AtomicUsize::new(0);
    let folder = Folder::new("reader-threads");
    let shape = [3 * BLOCK];
    let manifest = write(
        &folder,
        1,
        &[("a", Dtype::U8, shape.to_vec(), vec![Region::full(&shape)])],
    );
    let fs = real();
    let options = ReadOptions::new().with_threads(3);
    let wants = [want("a", Region::full(&shape))];
    let reader = |thread| Reader {
        thread,
        ..Reader::new(&*fs, &folder.0, &manifest, &options, 7)
    };
    let read = |thread| {
        let mut found = Vec::new();
        reader(thread)
            .read(&wants, |_, bytes| {
                found = bytes.to_vec();
                Ok(())
            })
            .map(|_| found)
    };
    // Stacks that no system has memory for.
    let error = read(|| thread::Builder::new().stack_size(1 << 60)).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Io { rank: 7, action, .. } if action == "start a thread to read"),
        "{error}"
    );
    let found = read(|| match STARTED.fetch_add(1, Ordering::Relaxed) {
        0 => thread::Builder::new(),
        _ => thread::Builder::new().stack_size(1 << 60),
    });
    assert!(found.unwrap() == bytes_of("a", &shape, &Region::full(&shape), 1));
}
