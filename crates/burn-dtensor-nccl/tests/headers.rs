//! The table, compared with NCCL's headers by a C compiler.
//!
//! `tests/headers` has `nccl.h` of several versions, as the Python package `nvidia-nccl-cu13`
//! contains it, each with its license.
#![cfg(unix)]

mod support;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::mem::{align_of, offset_of, size_of};
use std::process::Output;

use burn_dtensor_nccl::sys::{
    ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclScalarResidence_t, ncclUniqueId,
};
use burn_dtensor_nccl::{
    FUNCTIONS, FunctionSignature, MINIMUM_VERSION, NCCL_SHRINK_ABORT, NCCL_SHRINK_DEFAULT,
    NCCL_SPLIT_NOCOLOR, NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_DEFAULT, RedOp, ResultCode, Version,
    nonblocking_config,
};
use libloading::Library;
use support::{cc, shared_library, temporary};

/// Directories of `tests/headers`, with the sizes of `ncclConfig_t`.
const HEADERS: [(&str, Version, usize); 3] = [
    ("2.28.9", Version::new(2, 28, 9), 80),
    ("2.30.7", Version::new(2, 30, 7), 96),
    ("2.32.3", Version::new(2, 32, 3), 120),
];

/// Offsets of the fields of cudarc's `ncclConfig_t`, with the first version that has the field, if
/// not all accepted versions have it.
macro_rules! offsets {
    ($($field:ident $(($($since:literal),+))?),* $(,)?) => {
        [$((
            stringify!($field),
            offset_of!(ncclConfig_t, $field),
            offsets!(@since $($($since),+)?),
        )),*]
    };
    (@since) => { MINIMUM_VERSION };
    (@since $($since:literal),+) => { Version::new($($since),+) };
}

const CONFIG_OFFSETS: [(&str, usize, Version); 20] = offsets![
    size,
    magic,
    version,
    blocking,
    cgaClusterSize,
    minCTAs,
    maxCTAs,
    netName,
    splitShare,
    trafficClass,
    commName,
    collnetEnable,
    CTAPolicy,
    shrinkShare,
    nvlsCTAs,
    nChannelsPerNetPeer,
    nvlinkCentricSched,
    graphUsageMode(2, 29, 2),
    numRmaCtx(2, 29, 2),
    maxP2pPeers(2, 30, 3),
];

/// Enumerators of cudarc's enums, with their values.
macro_rules! enumerators {
    ($($type:ident: $($name:ident),*;)*) => {
        [$($((stringify!($name), $type::$name as u32)),*),*]
    };
}

const ENUMERATORS: [(&str, u32); 29] = enumerators! {
    ncclDataType_t: ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16,
        ncclFloat32, ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclNumTypes;
    ncclRedOp_t: ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps;
    ncclResult_t: ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError,
        ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError, ncclInProgress;
    ncclScalarResidence_t: ncclScalarDevice, ncclScalarHostImmediate;
};

/// Version that introduced `ncclTimeout`.
const TIMEOUT_SINCE: Version = Version::new(2, 30, 3);

#[test]
fn signatures_are_those_of_the_headers() {
    for (header, version, _) in HEADERS {
        let mut source = include() + "void compare(void) {\n";
        let mut compared = 0;
        for function in FUNCTIONS
            .iter()
            .filter(|function| function.since <= version)
        {
            let parameters = c_types(function.parameters);
            writeln!(source, "{}", assignment(function, &parameters)).unwrap();
            compared += 1;
        }
        source.push_str("}\n");
        assert_eq!(compared, FUNCTIONS.len(), "{header} has all functions");
        let output = compile(&format!("signatures-{header}.c"), header, &source);
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

/// Changes each function's signature in turn, so that the test above is known to find it.
#[test]
fn changed_signatures_are_found() {
    for (header, ..) in HEADERS {
        let mut source = include() + "void compare(void) {\n";
        let mut expected = BTreeSet::new();
        let mut change = |function: &FunctionSignature, parameters: &[String]| {
            expected.insert(source.lines().count() + 1);
            writeln!(source, "{}", assignment(function, parameters)).unwrap();
        };
        for function in FUNCTIONS {
            let parameters = c_types(function.parameters);
            for at in 0..parameters.len() {
                let mut changed = parameters.clone();
                changed[at] = "struct other*".to_owned();
                change(function, &changed);
            }
            if !parameters.is_empty() {
                change(function, &parameters[1..]);
            }
            let other_result = FunctionSignature {
                result: "*mut c_int",
                ..*function
            };
            change(&other_result, &parameters);
        }
        // Two enums are not the same, either.
        let all_reduce = FUNCTIONS
            .iter()
            .find(|function| function.name == "ncclAllReduce")
            .unwrap();
        let mut swapped = c_types(all_reduce.parameters);
        swapped.swap(3, 4);
        change(all_reduce, &swapped);

        source.push_str("}\n");
        let name = format!("changed-{header}.c");
        let output = compile(&name, header, &source);
        let found: BTreeSet<usize> = stderr(&output)
            .lines()
            .filter(|line| line.contains(": error: "))
            .filter_map(|line| line.split_once(&name)?.1.split(':').nth(1)?.parse().ok())
            .collect();
        assert_eq!(found, expected, "{}", stderr(&output));
    }
}

#[test]
fn layouts_and_values_are_those_of_the_headers() {
    for (header, version, config_size) in HEADERS {
        let mut equal = vec![
            ("NCCL_VERSION_CODE".to_owned(), version_code(version)),
            ("sizeof(ncclConfig_t)".to_owned(), config_size as i64),
            size::<ncclUniqueId>("ncclUniqueId"),
            ("sizeof(ncclUniqueId)".to_owned(), 128),
            (
                "_Alignof(ncclUniqueId)".to_owned(),
                align_of::<ncclUniqueId>() as i64,
            ),
            size::<ResultCode>("ncclResult_t"),
            size::<RedOp>("ncclRedOp_t"),
            size::<ncclDataType_t>("ncclDataType_t"),
            size::<ncclScalarResidence_t>("ncclScalarResidence_t"),
            ("NCCL_SPLIT_NOCOLOR".to_owned(), NCCL_SPLIT_NOCOLOR.into()),
            ("NCCL_SHRINK_DEFAULT".to_owned(), NCCL_SHRINK_DEFAULT.into()),
            ("NCCL_SHRINK_ABORT".to_owned(), NCCL_SHRINK_ABORT.into()),
            ("NCCL_REVOKE_DEFAULT".to_owned(), 0),
            ("NCCL_WIN_DEFAULT".to_owned(), NCCL_WIN_DEFAULT.into()),
            (
                "NCCL_WIN_COLL_SYMMETRIC".to_owned(),
                NCCL_WIN_COLL_SYMMETRIC.into(),
            ),
        ];
        for (field, offset, since) in CONFIG_OFFSETS {
            if since <= version {
                equal.push((format!("offsetof(ncclConfig_t, {field})"), offset as i64));
            }
        }
        for (name, value) in ENUMERATORS {
            equal.push((name.to_owned(), value.into()));
        }
        for (name, op) in [
            ("ncclSum", RedOp::SUM),
            ("ncclProd", RedOp::PROD),
            ("ncclMax", RedOp::MAX),
            ("ncclMin", RedOp::MIN),
            ("ncclAvg", RedOp::AVG),
        ] {
            equal.push((name.to_owned(), op.0.into()));
        }
        let mut results = 0;
        while let Some(name) = ResultCode(results).name() {
            if name != "ncclTimeout" || TIMEOUT_SINCE <= version {
                equal.push((name.to_owned(), results.into()));
            }
            results += 1;
        }
        if TIMEOUT_SINCE <= version {
            equal.push(("ncclNumResults".to_owned(), results.into()));
        }

        let mut source = include();
        for (expression, value) in &equal {
            writeln!(
                source,
                "_Static_assert({expression} == {value}, \"{expression}\");"
            )
            .unwrap();
        }
        let output = compile(&format!("layouts-{header}.c"), header, &source);
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

#[test]
fn the_configuration_is_that_of_the_initializer() {
    for (header, version, config_size) in HEADERS {
        let source = temporary(&format!("initializer-{header}.c"));
        let text = include() + "ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;\n";
        fs::write(&source, text).unwrap();
        let name = format!("initializer-{header}.so");
        let path = shared_library(&name, header, &source, &[]);

        let mut ours = nonblocking_config();
        assert_eq!(ours.size, size_of::<ncclConfig_t>());
        assert_eq!(ours.version, 23_000);
        assert_eq!(ours.blocking, 0);
        ours.blocking = i32::MIN;
        // The last field ends here; padding follows.
        let (_, last, _) = CONFIG_OFFSETS[CONFIG_OFFSETS.len() - 1];
        let common = (last + size_of::<i32>()).min(config_size);
        // SAFETY: the variable has `config_size` bytes. The fields of both have values up to the
        // common length, since there is no padding between them.
        unsafe {
            let library = Library::new(&path).unwrap();
            let theirs: *const u8 = *library.get(b"initial").unwrap();
            let theirs = std::slice::from_raw_parts(theirs, common);
            let ours = std::slice::from_raw_parts((&raw const ours).cast::<u8>(), common);
            let magic = offset_of!(ncclConfig_t, magic);
            assert_eq!(ours[magic..magic + 4], theirs[magic..magic + 4], "{header}");
            let blocking = offset_of!(ncclConfig_t, blocking);
            assert_eq!(ours[blocking..], theirs[blocking..], "{header}");
            let size = usize::from_ne_bytes(theirs[..8].try_into().unwrap());
            assert_eq!(size, config_size);
            let code = u32::from_ne_bytes(theirs[12..16].try_into().unwrap());
            assert_eq!(i64::from(code), version_code(version));
        }
    }
}

/// The reason why the version of a configuration is that of the struct: 2.30.5 put a field into the
/// padding at the end of it.
#[test]
fn later_headers_use_the_padding_of_the_configuration() {
    let (_, last, _) = CONFIG_OFFSETS[CONFIG_OFFSETS.len() - 1];
    let padding = last + size_of::<i32>();
    assert_eq!(padding + 4, size_of::<ncclConfig_t>());
    let source = include()
        + &format!(
            "_Static_assert(offsetof(ncclConfig_t, graphStreamOrdering) == {padding}, \"\");"
        );
    let output = compile("padding.c", "2.30.7", &source);
    assert!(output.status.success(), "{}", stderr(&output));
}

fn include() -> String {
    "#include <stddef.h>\n#include \"nccl.h\"\n".to_owned()
}

/// Checks a source, without an output.
fn compile(name: &str, header: &str, source: &str) -> Output {
    let path = temporary(name);
    fs::write(&path, source).unwrap();
    let path = path.to_str().expect("UTF-8");
    cc(header, &["-fsyntax-only", path])
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns a C block that assigns the function to a pointer of its type in the table.
fn assignment(function: &FunctionSignature, parameters: &[String]) -> String {
    let parameters = match parameters {
        [] => "void".to_owned(),
        parameters => parameters.join(", "),
    };
    let result = c_type(function.result);
    let name = function.name;
    format!("{{ {result} (*pointer)({parameters}) = {name}; (void)pointer; }}")
}

fn c_types(types: &[&str]) -> Vec<String> {
    types.iter().map(|name| c_type(name)).collect()
}

/// Returns the C type of a Rust type of the table.
fn c_type(name: &str) -> String {
    if let Some(target) = name.strip_prefix("*mut ") {
        return format!("{}*", c_type(target));
    }
    if let Some(target) = name.strip_prefix("*const ") {
        return format!("const {}*", c_type(target));
    }
    match name {
        "c_int" => "int",
        "c_char" => "char",
        "c_void" => "void",
        "usize" => "size_t",
        "ResultCode" => "ncclResult_t",
        "RedOp" => "ncclRedOp_t",
        "cudaStream_t" => "cudaStream_t",
        name if name.starts_with("nccl") => name,
        name => panic!("no C type for {name}"),
    }
    .to_owned()
}

fn size<T>(name: &str) -> (String, i64) {
    (format!("sizeof({name})"), size_of::<T>() as i64)
}

fn version_code(version: Version) -> i64 {
    i64::from(version.major * 10_000 + version.minor * 100 + version.patch)
}
