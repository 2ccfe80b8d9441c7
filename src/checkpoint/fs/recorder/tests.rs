//! The recorder finds what protocols with missing syncs lose, and nothing in those that are right.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::path::Path;

use itertools::Itertools;

use super::{Crash, Fault, NthCall, Recorder, Skipped};
use crate::checkpoint::fs::{FileSystem, Links, MANIFEST, WriteFile, read_all, write_atomically};
use crate::checkpoint::run_folder::remove_all;

fn path(path: &str) -> &Path {
    Path::new(path)
}

fn create(fs: &Recorder, file: &str, bytes: &str) -> Box<dyn WriteFile> {
    let mut writer = fs.create(path(file)).unwrap();
    writer.write_all(bytes.as_bytes()).unwrap();
    writer
}

/// Returns all files with their contents, as text.
fn contents(fs: &dyn FileSystem, dir: &Path) -> String {
    let entries = fs.list(dir).unwrap().into_iter().map(|entry| {
        let inner = dir.join(&entry.name);
        if entry.is_dir {
            return format!("{}({})", entry.name, contents(fs, &inner));
        }
        let bytes = read_all(fs, &inner, Links::Refuse, 100).unwrap();
        format!(
            "{}={}",
            entry.name,
            String::from_utf8(bytes).unwrap().replace('\0', "0")
        )
    });
    entries.collect_vec().join(" ")
}

/// Returns a recorder with a file `f` that holds `old`, all durable.
fn with_old() -> Recorder {
    let fs = Recorder::new();
    create(&fs, "/f", "old");
    fs.durable_copy()
}

/// Returns the contents that a crash may leave while a protocol runs, and those after it has
/// returned.
fn outcomes(fs: &Recorder, protocol: impl FnOnce(&Recorder)) -> [BTreeSet<String>; 2] {
    protocol(fs);
    fs.mark("returned");
    let (before, after): (Vec<Crash>, Vec<Crash>) =
        fs.crashes().partition(|crash| crash.marks.is_empty());
    [before, after].map(|crashes| {
        crashes
            .iter()
            .map(|crash| contents(&crash.left, path("/")))
            .collect()
    })
}

fn set<const N: usize>(texts: [&str; N]) -> BTreeSet<String> {
    texts.map(String::from).into()
}

#[test]
fn a_write_is_lost_torn_or_zero_until_its_sync() {
    let [_, after] = outcomes(&Recorder::new(), |fs| {
        let _open = create(fs, "/f", "1234");
        fs.sync_dir(path("/")).unwrap();
    });
    assert_eq!(
        after,
        set(["f=", "f=12", "f=123", "f=0000", "f=1200", "f=1234"])
    );
    let [before, after] = outcomes(&Recorder::new(), |fs| {
        create(fs, "/f", "1234").sync().unwrap();
    });
    assert_eq!(
        after,
        set(["", "f=1234"]),
        "a file's sync does not keep its entry"
    );
    assert!(
        before.contains("f=1200") && before.contains(""),
        "{before:?}"
    );
    let [_, after] = outcomes(&Recorder::new(), |fs| {
        let mut open = create(fs, "/f", "12");
        open.write_all(b"34").unwrap();
        fs.sync_dir(path("/")).unwrap();
    });
    assert!(
        after.is_superset(&set(["f=", "f=12", "f=0034", "f=1234", "f=123", "f=1234"])),
        "{after:?}"
    );
}

#[test]
fn replacing_a_file_takes_a_sync_of_the_file_and_of_the_folder() {
    let replace = |sync_file: bool, sync_dir: bool| {
        outcomes(&with_old(), |fs| {
            let mut open = create(fs, "/t", "new");
            if sync_file {
                open.sync().unwrap();
            }
            fs.rename(path("/t"), path("/f")).unwrap();
            if sync_dir {
                fs.sync_dir(path("/")).unwrap();
            }
        })
    };
    let file = |state: &String| {
        state
            .split(' ')
            .find(|file| file.starts_with("f="))
            .unwrap()
            .to_owned()
    };
    let [before, after] = replace(true, true);
    assert_eq!(
        before.iter().map(file).collect::<BTreeSet<_>>(),
        set(["f=old", "f=new"])
    );
    assert_eq!(after, set(["f=new"]));
    let [_, after] = replace(true, false);
    assert_eq!(after, set(["f=old", "f=old t=new", "f=new"]));
    let [_, after] = replace(false, true);
    assert_eq!(after, set(["f=", "f=n", "f=ne", "f=000", "f=n00", "f=new"]));
    let [before, _] = outcomes(&with_old(), |fs| {
        create(fs, "/f.tmp", "").sync().unwrap();
        fs.sync_dir(path("/")).unwrap();
        write_atomically(fs, path("/f"), b"new").unwrap();
    });
    assert!(
        before.contains("f=new f.tmp="),
        "a rename is durable before what made the file that it renames"
    );
}

#[test]
fn entries_are_durable_by_the_sync_of_their_own_folder() {
    let [_, after] = outcomes(&Recorder::new(), |fs| {
        fs.create_dir(path("/d")).unwrap();
        create(fs, "/d/a", "1").sync().unwrap();
        create(fs, "/d/b", "2").sync().unwrap();
        fs.sync_dir(path("/d")).unwrap();
    });
    assert_eq!(
        after,
        set(["", "d(a=1 b=2)"]),
        "the folder's own entry is its parent's"
    );
    let [_, after] = outcomes(&Recorder::new(), |fs| {
        fs.create_dir(path("/d")).unwrap();
        create(fs, "/d/a", "1").sync().unwrap();
        create(fs, "/d/b", "2").sync().unwrap();
        fs.sync_dir(path("/")).unwrap();
    });
    assert_eq!(
        after,
        set(["d()", "d(a=1)", "d(b=2)", "d(a=1 b=2)"]),
        "in any combination"
    );
    let [_, after] = outcomes(&with_old(), |fs| {
        fs.create_dir(path("/d")).unwrap();
        fs.sync_dir(path("/")).unwrap();
        fs.rename(path("/f"), path("/d/f")).unwrap();
    });
    assert_eq!(
        after,
        set(["d() f=old", "d(f=old)"]),
        "a rename is all or nothing"
    );
    let [_, after] = outcomes(&with_old(), |fs| {
        fs.remove_file(path("/f")).unwrap();
        create(fs, "/f", "new").sync().unwrap();
    });
    assert_eq!(
        after,
        set(["f=old", "", "f=new"]),
        "a removal is lost as well"
    );
    let [_, after] = outcomes(&with_old(), |fs| {
        fs.remove_file(path("/f")).unwrap();
        fs.sync_dir(path("/")).unwrap();
    });
    assert_eq!(after, set([""]));
}

/// Returns the contents that a crash may leave of `count` empty files that have no durable entry,
/// and the number of combinations.
fn left_of_files(count: usize) -> (BTreeSet<String>, usize) {
    let fs = Recorder::new();
    (0..count).for_each(|file| create(&fs, &format!("/{file}"), "").sync().unwrap());
    let mut crashes = fs.crashes();
    let left = crashes
        .by_ref()
        .map(|crash| contents(&crash.left, path("/")))
        .collect();
    (left, crashes.tried())
}

#[test]
fn all_combinations_of_a_few_changes_and_some_of_many() {
    let files = |files: &[usize]| files.iter().map(|file| format!("{file}=")).join(" ");
    let (left, tried) = left_of_files(4);
    assert_eq!(left, (0..4).powerset().map(|some| files(&some)).collect());
    assert_eq!(
        tried,
        [1, 2, 4, 8, 16]
            .into_iter()
            .flat_map(|of_step| [of_step; 2])
            .sum::<usize>()
            - 1
    );
    let (left, tried) = left_of_files(10);
    for one in 0..10 {
        assert!(left.contains(&files(&[one])) && left.contains(&files(&(0..one).collect_vec())));
        assert!(left.contains(&files(&(0..10).filter(|file| *file != one).collect_vec())));
    }
    assert!(left.contains(&files(&(0..10).collect_vec())) && left.contains(""));
    assert!((600..1300).contains(&tried), "{tried}");
}

/// Runs a protocol without fault, and once with each of its syncs left out. Returns the syncs that
/// nothing depends on.
fn unneeded_syncs(
    start: &Recorder,
    protocol: impl Fn(&Recorder),
    is_right: impl Fn(&Crash) -> bool,
) -> BTreeSet<NthCall> {
    let fs = start.durable_copy();
    protocol(&fs);
    for crash in fs.crashes() {
        assert!(is_right(&crash), "{}: {:?}", crash.description, crash.left);
    }
    let is_unneeded = |sync: &NthCall| {
        let fs = start.durable_copy();
        fs.skip(Skipped::Sync(sync.clone()));
        protocol(&fs);
        fs.crashes().all(|crash| is_right(&crash))
    };
    fs.syncs().into_iter().filter(is_unneeded).collect()
}

#[test]
fn write_atomically_needs_each_of_its_syncs() {
    let protocol = |fs: &Recorder| {
        write_atomically(fs, path("/f"), b"new").unwrap();
        fs.mark("returned");
    };
    let is_right = |crash: &Crash| {
        let file = read_all(&crash.left, path("/f"), Links::Refuse, 100).unwrap();
        file == b"new" || file == b"old" && crash.marks.is_empty()
    };
    assert_eq!(unneeded_syncs(&with_old(), protocol, is_right), [].into());
}

#[test]
fn a_checkpoint_that_is_removed_in_part_has_its_name_no_more() {
    let start = Recorder::new();
    start.create_dir_all(path("/run/step-1")).unwrap();
    create(&start, "/run/step-1/manifest.json", "{}");
    create(&start, "/run/step-1/data", "1");
    let start = start.durable_copy();
    let remove = |fs: &Recorder| remove_all(fs, [path("/run/step-1").to_owned()]);
    let protocol = |fs: &Recorder| assert!(remove(fs).is_empty());
    let is_right = |crash: &Crash| {
        let dir = path("/run/step-1");
        let names = crash
            .left
            .list(dir)
            .map(|entries| entries.into_iter().map(|entry| entry.name).collect_vec());
        let names = names.unwrap_or_default();
        names.iter().any(|name| name == "data") || names.iter().all(|name| name != MANIFEST)
    };
    assert_eq!(unneeded_syncs(&start, protocol, is_right), [].into());

    // A process is killed at any call, and another removes the folder again.
    let mut killed = 0;
    loop {
        let fs = start.durable_copy();
        fs.fail(Fault {
            call: killed,
            kind: ErrorKind::Other,
            lasting: true,
        });
        let errors = remove(&fs);
        fs.heal();
        if errors.is_empty() {
            break;
        }
        // Under whatever name it has now.
        let left = fs.list(path("/run")).unwrap().into_iter();
        let left = left.map(|entry| path("/run").join(entry.name));
        assert!(remove_all(&fs, left).is_empty());
        assert_eq!(fs.list(path("/run")).unwrap(), []);
        assert!(
            fs.crashes().all(|crash| is_right(&crash)),
            "killed at call {killed}"
        );
        killed += 1;
    }
    assert!(killed > 6, "{killed} calls");
}

#[test]
fn a_created_folder_is_durable_even_if_another_process_created_it() {
    let protocol = |fs: &Recorder| {
        fs.create_dir_all(path("/a/b/c")).unwrap();
        fs.mark("returned");
    };
    let is_right = |crash: &Crash| {
        crash.marks.is_empty() || crash.left.is_dir(path("/a/b/c"), Links::Refuse).unwrap()
    };
    assert_eq!(
        unneeded_syncs(&Recorder::new(), protocol, is_right),
        [].into()
    );
    let mut killed = 0;
    loop {
        let fs = Recorder::new();
        fs.fail(Fault {
            call: killed,
            kind: ErrorKind::Other,
            lasting: true,
        });
        let created = fs.create_dir_all(path("/a/b/c"));
        fs.heal();
        protocol(&fs);
        assert!(
            fs.crashes().all(|crash| is_right(&crash)),
            "killed at call {killed}"
        );
        if created.is_ok() {
            break;
        }
        killed += 1;
    }
    assert_eq!(killed, 9, "calls");
}

#[test]
fn a_write_that_fails_may_have_written_some_bytes() {
    let fs = Recorder::new();
    fs.fail(Fault {
        call: 1,
        kind: ErrorKind::StorageFull,
        lasting: false,
    });
    let mut open = fs.create(path("/f")).unwrap();
    let error = open.write_all(b"1234").unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string()),
        (ErrorKind::StorageFull, "`/f`: no storage space".into())
    );
    open.write_all(b"5").unwrap();
    assert_eq!(contents(&fs, path("/")), "f=125");
    fs.fail(Fault {
        call: 0,
        kind: ErrorKind::StorageFull,
        lasting: true,
    });
    assert!([(); 2].iter().all(|()| open.sync().is_err()) && fs.heal());
}

#[test]
fn errors_at_every_call() {
    for kind in [
        ErrorKind::StorageFull,
        ErrorKind::ReadOnlyFilesystem,
        ErrorKind::Other,
    ] {
        for (call, lasting) in (0..).cartesian_product([false, true]) {
            let fs = with_old();
            fs.fail(Fault {
                call,
                kind,
                lasting,
            });
            let written: io::Result<()> = write_atomically(&fs, path("/f"), b"new");
            let is_met = !fs.heal() || written.is_err();
            assert_eq!(
                written.as_ref().err().map(io::Error::kind),
                is_met.then_some(kind),
                "call {call}"
            );
            if !is_met {
                assert!(call >= 3, "{kind}: {call} calls");
                break;
            }
            let left = contents(&fs, path("/"));
            let is_clean = ["f=old", "f=new"].contains(&left.as_str());
            assert!(
                is_clean || lasting && kind != ErrorKind::StorageFull,
                "call {call}: {left}"
            );
            write_atomically(&fs, path("/f"), b"again").unwrap();
            assert_eq!(contents(&fs.lose_pending(), path("/")), "f=again");
        }
    }
}
