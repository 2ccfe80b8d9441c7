use std::collections::{BTreeMap, BTreeSet};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use safetensors::Dtype;

use super::super::manifest::{FileEntry, MeshEntry, TensorEntry};
use super::*;

/// Returns the chunks of a tensor as of a mesh: a grid, and some cells split further.
pub(crate) fn random_chunks(shape: &[usize], random: &mut StdRng) -> Vec<Region> {
    let splits = |&len: &usize, random: &mut StdRng| {
        let inner = (1..len).filter(|_| random.random_bool(0.3)).collect_vec();
        [0].into_iter()
            .chain(inner)
            .chain([len])
            .tuple_windows()
            .map(|(a, b)| a..b)
            .collect_vec()
    };
    if shape.is_empty() {
        return vec![Region::full(shape)];
    }
    let grid = shape
        .iter()
        .map(|len| splits(len, random))
        .multi_cartesian_product();
    let most = random.random_range(1..20);
    grid.flat_map(|slices| Region::of_slices(&slices).split(most))
        .collect()
}

pub(crate) fn random_region(shape: &[usize], random: &mut StdRng) -> Region {
    let slice = |&len: &usize, random: &mut StdRng| {
        let begin = random.random_range(0..=len);
        begin..random.random_range(begin..=len)
    };
    if random.random_bool(0.3) {
        return Region::full(shape);
    }
    Region::of_slices(&shape.iter().map(|len| slice(len, random)).collect_vec())
}

fn manifest(files: usize) -> Manifest {
    Manifest {
        step: None,
        required_features: Vec::new(),
        software: String::new(),
        mesh: MeshEntry {
            shape: vec![],
            names: vec![],
        },
        files: (0..files)
            .map(|file| FileEntry::new(format!("{file}"), 8))
            .collect(),
        tensors: BTreeMap::new(),
        values: BTreeMap::new(),
        rank_values: BTreeMap::new(),
    }
}

/// Random tensors of few elements. Blocks have 32 bytes, so that there is something to plan.
fn random_manifest(random: &mut StdRng, block: usize) -> Manifest {
    let mut manifest = manifest(3);
    for tensor in 0..random.random_range(1..5) {
        let dims = random.random_range(0..4);
        let shape: Vec<usize> = (0..dims).map(|_| random.random_range(1..10)).collect();
        let dtype: StoredDType = [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::C64]
            [random.random_range(0..4)]
        .try_into()
        .unwrap();
        let checksummed = random.random_bool(0.5);
        let mut chunk = |region: Region| {
            let file = random.random_range(0..3);
            let len = region.num_elements() * dtype.bytes();
            let begin =
                manifest.files[file].len + random.random_range(0..3) * random.random_range(0..30);
            manifest.files[file].len = begin + len as u64;
            // The plan counts on there being checksums, not on their number.
            ChunkEntry {
                region,
                file,
                begin,
                checksums: vec![0; if checksummed { len.div_ceil(block) } else { 0 }],
            }
        };
        let mut own = StdRng::seed_from_u64(tensor);
        let chunks = random_chunks(&shape, &mut own)
            .into_iter()
            .map(&mut chunk)
            .collect();
        manifest.tensors.insert(
            format!("{tensor}"),
            TensorEntry {
                shape,
                dtype,
                placements: String::new(),
                chunks,
            },
        );
    }
    manifest
}

use super::super::manifest::StoredDType;

/// Returns the file and position of each byte of a region, in the order of its memory.
fn places(manifest: &Manifest, want: &Want) -> Vec<(usize, u64)> {
    let tensor = &manifest.tensors[&want.key];
    let indices = |region: &Region| -> Vec<Vec<usize>> {
        if region.shape.is_empty() {
            vec![vec![]]
        } else {
            region.slices().multi_cartesian_product().collect()
        }
    };
    let mut of_element = BTreeMap::new();
    for chunk in &tensor.chunks {
        for (position, element) in indices(&chunk.region).into_iter().enumerate() {
            of_element.insert(
                element,
                (
                    chunk.file,
                    chunk.begin + (position * tensor.dtype.bytes()) as u64,
                ),
            );
        }
    }
    let bytes = |element| {
        let (file, at) = of_element[&element];
        (0..tensor.dtype.bytes() as u64).map(move |byte| (file, at + byte))
    };
    indices(&want.region).into_iter().flat_map(bytes).collect()
}

const TINY: Limits = Limits {
    max_over_read: 1.25,
    block: 32,
    page: 6,
    long: 24,
    read: 64,
    span: 200,
    threads: 2,
};

#[test]
fn every_byte_is_read_once_and_goes_to_its_place() {
    let mut direct = 0;
    let mut classes = BTreeSet::new();
    let mut joined = 0;
    let mut several = 0;
    for seed in 0..3000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let manifest = random_manifest(random, TINY.block);
        let keys = manifest.tensors.keys().cloned().collect_vec();
        let want = |_| {
            let key = keys[random.random_range(0..keys.len())].clone();
            let region = random_region(&manifest.tensors[&key].shape, random);
            Want { key, region }
        };
        let wants = (0..4).map(want).collect_vec();
        let plan = ReadPlan::new(&manifest, &wants, &TINY);

        // Where each byte comes from, by way of the copies of extents.
        let mut found = wants
            .iter()
            .map(|want| vec![None; places(&manifest, want).len()])
            .collect_vec();
        for read in &plan.reads {
            assert!(
                read.bytes.end - read.bytes.start <= TINY.read as u64,
                "seed {seed}"
            );
            assert!(
                read.bytes.end <= manifest.files[read.file].len,
                "seed {seed}"
            );
            for extent in &plan.extents[read.extents.clone()] {
                let (file, bytes) = plan.place(extent);
                assert!(
                    file == read.file
                        && bytes.start >= read.bytes.start
                        && bytes.end <= read.bytes.end
                );
                let mut copies = 0;
                for section in &plan.sections[extent.sections.clone()] {
                    for copy in section.copies.each(extent.bytes.clone()) {
                        assert!(copy.len > 0);
                        copies += 1;
                        for byte in 0..copy.len {
                            let place = (file, section.chunk.begin + (copy.from + byte) as u64);
                            assert!(bytes.contains(&place.1), "seed {seed}");
                            assert_eq!(
                                found[section.want][copy.to + byte].replace(place),
                                None,
                                "seed {seed}: twice"
                            );
                        }
                    }
                }
                if let Some((want, to)) = plan.direct(extent) {
                    assert_eq!(
                        (copies, found[want][to]),
                        (1, Some((file, bytes.start))),
                        "seed {seed}"
                    );
                    direct += 1;
                }
                let section = &plan.sections[extent.sections.start];
                if !section.chunk.checksums.is_empty() {
                    let is_complete =
                        |byte: usize| byte.is_multiple_of(TINY.block) || byte == section.len;
                    assert!(
                        is_complete(extent.bytes.start) && is_complete(extent.bytes.end),
                        "seed {seed}: not complete blocks"
                    );
                }
            }
        }
        for (found, want) in found.iter().zip(&wants) {
            let expected = places(&manifest, want).into_iter().map(Some).collect_vec();
            assert_eq!(*found, expected, "seed {seed}: {want:?}");
        }

        // Neighbours in a chunk are one extent, up to the length of a read.
        for (a, b) in plan.extents.iter().tuple_windows() {
            let joined = a.sections != b.sections
                || a.bytes.end < b.bytes.start
                || a.bytes.len() == TINY.read;
            assert!(joined, "seed {seed}: {a:?} {b:?}");
        }

        // Every extent is in one read, every read in one span, and no byte in two.
        assert!(
            plan.reads
                .iter()
                .flat_map(|read| read.extents.clone())
                .eq(0..plan.extents.len()),
            "seed {seed}"
        );
        assert!(
            plan.spans.iter().cloned().flatten().eq(0..plan.reads.len()),
            "seed {seed}"
        );
        for span in &plan.spans {
            let reads = &plan.reads[span.clone()];
            let bytes: u64 = reads
                .iter()
                .map(|read| read.bytes.end - read.bytes.start)
                .sum();
            assert!(
                reads.iter().map(|read| read.file).all_equal() && bytes <= TINY.span as u64,
                "seed {seed}"
            );
        }
        for (a, b) in plan.reads.iter().tuple_windows() {
            assert!(
                a.file < b.file || a.bytes.end <= b.bytes.start,
                "seed {seed}: {a:?} {b:?}"
            );
            // Rule 5, except for reads that would be too long.
            let [long_a, long_b] =
                [a, b].map(|read| read.bytes.end - read.bytes.start >= TINY.long as u64);
            let fits = b.bytes.end.saturating_sub(a.bytes.start) <= TINY.read as u64;
            if a.file == b.file && fits {
                let between = b.bytes.start - a.bytes.end;
                let first = plan.place(&plan.extents[b.extents.start]).1;
                let fits = first.end - a.bytes.start <= TINY.read as u64;
                let short = !long_a || first.end - first.start < TINY.long as u64;
                assert!(
                    !fits || !(between == 0 || between < TINY.page as u64 && short),
                    "seed {seed}: {a:?} {b:?}"
                );
                several += usize::from(long_b);
            }
        }
        for read in &plan.reads {
            let places = plan.extents[read.extents.clone()]
                .iter()
                .map(|extent| plan.place(extent).1);
            for (a, b) in places.tuple_windows() {
                joined += 1;
                assert!(
                    b.start - a.end < TINY.page as u64,
                    "seed {seed}: a page is read for nothing"
                );
            }
        }

        // What is counted.
        let needed: usize = found.iter().map(Vec::len).sum();
        let bytes: u64 = plan
            .reads
            .iter()
            .map(|read| read.bytes.end - read.bytes.start)
            .sum();
        let stats = &plan.stats;
        assert_eq!(
            (stats.needed, stats.read + stats.block_rounding),
            (needed as u64, bytes),
            "seed {seed}"
        );
        assert_eq!(stats.reads, plan.reads.len() as u64);
        assert_eq!(
            stats
                .by_class
                .values()
                .map(|class| class.needed)
                .sum::<u64>(),
            needed as u64
        );
        classes.extend(stats.by_class.keys().copied());
    }
    assert!(
        direct > 1000 && joined > 1000 && several > 100 && classes.len() == 3,
        "{direct} {joined} {several} {classes:?}"
    );
}

/// A matrix in one chunk without checksums, of which some columns are wanted.
fn columns(rows: usize, bytes: usize, columns: Range<usize>) -> (Manifest, [Want; 1]) {
    let mut manifest = manifest(1);
    let region = Region::full(&[rows, bytes]);
    manifest.files[0].len += (rows * bytes) as u64;
    let chunks = vec![ChunkEntry {
        region,
        file: 0,
        begin: 8,
        checksums: vec![],
    }];
    let dtype = Dtype::U8.try_into().unwrap();
    manifest.tensors.insert(
        "m".into(),
        TensorEntry {
            shape: vec![rows, bytes],
            dtype,
            placements: String::new(),
            chunks,
        },
    );
    (
        manifest,
        [Want {
            key: "m".into(),
            region: Region::of_slices(&[0..rows, columns]),
        }],
    )
}

#[test]
fn runs_are_joined_by_their_length_and_distance() {
    let limits = Limits::new(1.1, 4 << 20, 2);
    let read = |rows, bytes, wanted| {
        let (manifest, wants) = columns(rows, bytes, wanted);
        let stats = ReadPlan::new(&manifest, &wants, &limits).stats;
        let class = stats.by_class.into_keys().exactly_one().unwrap();
        (class, stats.read, stats.reads)
    };
    const K: usize = 1 << 10;
    // Long runs: apart, unless at most a tenth more is read; one byte decides.
    assert_eq!(
        read(10, 32 * K, 0..16 * K),
        (RunClass::LongRuns, 160 << 10, 10)
    );
    assert_eq!(
        read(10, 20 * K, 0..17 * K),
        (RunClass::LongRuns, 170 << 10, 10)
    );
    assert_eq!(
        read(10, 20 * K, 0..19 * K),
        (RunClass::LongRuns, 199 << 10, 1)
    );
    // Short runs: all that lies between, however much.
    assert_eq!(
        read(10, 32 * K, 1..16 * K),
        (
            RunClass::ShortRuns,
            9 * 32 * K as u64 + 16 * K as u64 - 1,
            1
        )
    );
    assert_eq!(
        read(1000, 64 * K, 5..6),
        (RunClass::ShortRuns, 999 * 64 * K as u64 + 1, 16)
    );
    // All next to each other.
    assert_eq!(
        read(10, 32 * K, 0..32 * K),
        (RunClass::Contiguous, 320 << 10, 1)
    );
    assert_eq!(read(1, 32 * K, 5..6), (RunClass::Contiguous, 1, 1));
    // Twelve matrices with long rows once they are joined: not all between the matrices.
    let mut manifest = manifest(1);
    let shape = [12, 8, 8 * K];
    let chunks = vec![ChunkEntry {
        region: Region::full(&shape),
        file: 0,
        begin: 8,
        checksums: vec![],
    }];
    manifest.files[0].len += shape.iter().product::<usize>() as u64;
    let tensor = TensorEntry {
        shape: shape.to_vec(),
        dtype: Dtype::U8.try_into().unwrap(),
        placements: String::new(),
        chunks,
    };
    manifest.tensors.insert("m".into(), tensor);
    let wants = [Want {
        key: "m".into(),
        region: Region::of_slices(&[0..12, 0..8, 0..K]),
    }];
    let stats = ReadPlan::new(&manifest, &wants, &limits).stats;
    assert_eq!(
        (stats.needed, stats.read, stats.reads),
        (96 << 10, (12 * (7 * 8 + 1)) << 10, 12)
    );
}

#[test]
fn long_runs_are_never_read_for_more_than_the_cap() {
    let limits = Limits {
        max_over_read: 1.1,
        ..Limits::new(1.1, 4 << 20, 2)
    };
    for seed in 0..300 {
        let random = &mut StdRng::seed_from_u64(seed);
        let rows = random.random_range(1..50);
        let bytes = random.random_range(17..90) << 10;
        let begin = random.random_range(0..bytes - (16 << 10));
        let (manifest, wants) = columns(
            rows,
            bytes,
            begin..random.random_range(begin + (16 << 10)..=bytes),
        );
        let stats = ReadPlan::new(&manifest, &wants, &limits).stats;
        assert!(stats.over_read() <= 1.1, "seed {seed}: {stats}");
        assert_eq!(stats.block_rounding, 0);
    }
}

#[test]
fn spans_are_divided_among_threads_and_bounded() {
    let spans = |gib: usize, threads| {
        let (manifest, wants) = columns(gib << 10, 1 << 20, 0..1 << 20);
        let limits = Limits::new(1.1, 4 << 20, threads);
        let plan = ReadPlan::new(&manifest, &wants, &limits);
        plan.spans
            .iter()
            .map(|span| plan.reads[span.end - 1].bytes.end - plan.reads[span.start].bytes.start)
            .max()
            .unwrap()
            >> 20
    };
    assert_eq!(
        [spans(1, 2), spans(1, 4), spans(1, 8), spans(1, 1000)],
        [128, 128, 64, 4]
    );
}

#[test]
#[should_panic(expected = "the chunks of `m` are not a partition of [0:2,0:4]")]
fn chunks_that_overlap_are_not_read() {
    let (mut manifest, wants) = columns(2, 4, 0..4);
    let tensor = manifest.tensors.get_mut("m").unwrap();
    tensor.chunks[0].region = Region::full(&[1, 4]);
    tensor.chunks.push(tensor.chunks[0].clone());
    ReadPlan::new(&manifest, &wants, &TINY);
}
