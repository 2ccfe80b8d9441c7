//! Prose: doc comments begin with a noun phrase or a verb, and comments, texts and documents avoid
//! words that say little.

use std::fs;
use std::path::Path;

use crate::names::{RETIRED_WORDS, sources};
use crate::pages;

/// First words of doc comments that announce a thing instead of naming it.
const OPENINGS: [&str; 7] = ["How", "Its", "Of", "That", "What", "Where", "Whether"];

/// The most doc comments in a hundred that may begin so.
const MOST_OPENINGS: usize = 3;

/// Phrases that prose does not contain, besides [`RETIRED_WORDS`], with what to write instead.
const RETIRED_PHRASES: [(&str, &str); 15] = [
    ("all the same", "nevertheless"),
    ("are told", "are notified, get the error"),
    ("be it", "whether"),
    ("but for", "except for"),
    ("go on", "continue"),
    ("goes on", "continues"),
    ("going on", "continuing"),
    ("how-manieth", "index, sequence number"),
    ("in common", "shared"),
    ("is told", "is notified, gets the error"),
    ("one's own", "custom"),
    ("so-manieth", "every n-th"),
    ("under way", "in flight"),
    ("what is left", "the rest"),
    ("word of", "notification of"),
];

/// Files that still contain such words, and are going to be replaced.
const EXCEPTIONS: [&str; 0] = [];

#[test]
fn few_doc_comments_begin_with_an_announcement() {
    let root = crate::root();
    let (mut count, mut found) = (0, Vec::new());
    for path in ["src", "crates"]
        .iter()
        .flat_map(|folder| sources(&root.join(folder)))
    {
        let text = fs::read_to_string(&path).expect("a source");
        let comments = doc_comments(&text);
        count += comments.len();
        let bad = comments
            .into_iter()
            .filter(|(_, text)| is_announcement(text));
        found.extend(bad.map(|(line, text)| {
            format!(
                "{}:{line}: {text}",
                path.strip_prefix(&root).unwrap().display()
            )
        }));
    }
    assert!(
        found.len() * 100 <= count * MOST_OPENINGS,
        "{} of {count}:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn retired_words_are_not_in_prose() {
    let root = crate::root();
    let mut found = Vec::new();
    let rust = ["src", "crates", "examples"]
        .iter()
        .flat_map(|folder| sources(&root.join(folder)));
    for path in rust.chain(pages::all(&root)) {
        let text = fs::read_to_string(&path).expect("a file");
        let name = path
            .strip_prefix(&root)
            .expect("inside")
            .display()
            .to_string();
        let parts = if is_rust(&path) {
            prose(&text)
        } else {
            paragraphs(&text)
        };
        let faults = parts
            .iter()
            .flat_map(|(line, text)| retired(text).map(move |fault| (line, fault)));
        let faults: Vec<_> = faults
            .map(|(line, fault)| format!("{name}:{line}: {fault}"))
            .collect();
        match EXCEPTIONS.contains(&name.as_str()) {
            true if faults.is_empty() => found.push(format!(
                "{name} contains none: remove it from the exceptions"
            )),
            true => {}
            false => found.extend(faults),
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn announcements_and_retired_words_are_found() {
    let source = concat!(
        "/// What it is.\n/// Of it.\nfn f() {\n    // Whole `piece`.\n    let x = \"goes\n    on // no\"; // alike\n",
        "    let c = '\"'; let r = r#\"a \"cut\" here\"#;\n}\n/// Returns `whole`.\n",
    );
    let comments: Vec<_> = doc_comments(source)
        .into_iter()
        .map(|(line, text)| (line, is_announcement(&text)))
        .collect();
    assert_eq!(comments, [(1, true), (9, false)]);
    let found: Vec<_> = prose(source)
        .iter()
        .flat_map(|(line, text)| retired(text).map(|fault| (*line, fault)))
        .collect();
    let expected = [
        (4, "write full, unsharded, complete for `whole`"),
        (5, "write continues for `goes on`"),
        (6, "write identical, same for `alike`"),
        (7, "write shard, split, shard sizes for `cut`"),
    ];
    assert_eq!(
        found,
        expected.map(|(line, fault)| (line, fault.to_owned()))
    );
    let page = "A whole.\n\n```rust\nlet whole = 1;\n```\n`whole`\n";
    assert_eq!(
        paragraphs(page)
            .iter()
            .flat_map(|(_, text)| retired(text))
            .count(),
        1
    );
}

fn is_rust(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
}

fn is_announcement(text: &str) -> bool {
    let first = text.split(|letter: char| !letter.is_alphanumeric()).next();
    first.is_some_and(|first| OPENINGS.contains(&first))
}

/// Returns what to write instead of the retired words and phrases of a text, code in backticks
/// aside.
fn retired(text: &str) -> impl Iterator<Item = String> {
    let plain = without_code(text).to_lowercase();
    let words: Vec<&str> = plain
        .split(|letter: char| !letter.is_alphanumeric() && !"'-_".contains(letter))
        .collect();
    let words: Vec<_> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let plain = format!(" {} ", words.join(" "));
    let all = RETIRED_WORDS.into_iter().chain(RETIRED_PHRASES);
    all.filter(move |(word, _)| plain.contains(&format!(" {word} ")))
        .map(|(word, instead)| format!("write {instead} for `{word}`"))
}

/// Removes what stands between backticks.
fn without_code(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join("``")
}

/// Returns the doc comments of a source with their lines.
fn doc_comments(text: &str) -> Vec<(usize, String)> {
    let mut comments: Vec<(usize, usize, String)> = Vec::new();
    for Part { line, kind, text } in parts(text) {
        let body = text.strip_prefix("///").or(text.strip_prefix("//!"));
        let Some(body) = body.filter(|_| kind == Kind::Comment) else {
            continue;
        };
        match comments.last_mut() {
            Some((_, last, _)) if *last + 1 == line => *last = line,
            _ => comments.push((line, line, body.trim().to_owned())),
        }
    }
    comments
        .into_iter()
        .map(|(line, _, text)| (line, text))
        .collect()
}

/// Returns the comments and string literals of a source with their lines, without fenced code in
/// comments. Comments of adjacent lines are one.
fn prose(text: &str) -> Vec<(usize, String)> {
    let (mut all, mut is_code): (Vec<(usize, usize, String)>, bool) = (Vec::new(), false);
    for Part { line, kind, text } in parts(text) {
        if kind == Kind::Literal {
            all.push((line, 0, text.replace("\\\n", " ")));
            is_code = false;
            continue;
        }
        let body = text.trim_start_matches(['/', '!', '*']).trim();
        if body.starts_with("```") {
            is_code = !is_code;
            continue;
        }
        match all.last_mut() {
            _ if is_code => {}
            Some((_, last, before)) if *last + 1 == line => {
                (*last, *before) = (line, format!("{before} {body}"))
            }
            _ => all.push((line, line, body.to_owned())),
        }
    }
    all.into_iter()
        .map(|(line, _, text)| (line, text))
        .collect()
}

/// Returns the paragraphs of a page with their lines, without fenced code.
fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let (mut all, mut is_code, mut is_open) = (Vec::new(), false, false);
    for (line, text) in text.lines().enumerate() {
        if text.trim_start().starts_with("```") {
            (is_code, is_open) = (!is_code, false);
        } else if !is_code {
            match all.last_mut() {
                Some((_, before)) if is_open => *before = format!("{before} {text}"),
                _ => all.push((line + 1, text.to_owned())),
            }
            is_open = !text.trim().is_empty();
        }
    }
    all
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Comment,
    Literal,
}

/// A comment or string literal of a source.
#[derive(Debug)]
struct Part {
    line: usize,
    kind: Kind,
    text: String,
}

/// Returns the comments, a line each, and the string literals of a source, in order.
fn parts(text: &str) -> Vec<Part> {
    let (mut all, mut rest, mut line) = (Vec::new(), text, 1);
    while let Some(next) = rest.chars().next() {
        let (length, kind) = match next {
            '/' if rest.starts_with("//") => {
                (rest.find('\n').unwrap_or(rest.len()), Some(Kind::Comment))
            }
            '"' => (string(rest), Some(Kind::Literal)),
            'r' if raw(rest).is_some() => (raw(rest).unwrap_or(1), Some(Kind::Literal)),
            '\'' => (character(rest), None),
            // An identifier that ends in `r` begins no raw string.
            _ if next.is_alphanumeric() || next == '_' => (
                rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_')
                    .unwrap_or(rest.len()),
                None,
            ),
            _ => (next.len_utf8(), None),
        };
        let (part, after) = rest.split_at(length);
        all.extend(kind.map(|kind| Part {
            line,
            kind,
            text: part.to_owned(),
        }));
        line += part.matches('\n').count();
        rest = after;
    }
    all
}

/// Returns the length of the string literal that `text` begins with.
fn string(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|(_, letter)| {
        let ends = *letter == '"' && !is_escaped;
        is_escaped = *letter == '\\' && !is_escaped;
        ends
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}

/// Returns the length of the raw string literal that `text` begins with, if it does.
fn raw(text: &str) -> Option<usize> {
    let hashes = text[1..]
        .chars()
        .take_while(|letter| *letter == '#')
        .count();
    let body = text[1 + hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(2 + hashes + body.find(&end)? + end.len())
}

/// Returns the length of the character that `text` begins with, or of the quote of a lifetime.
fn character(text: &str) -> usize {
    let mut letters = text.char_indices().skip(1);
    match letters.next() {
        Some((_, '\\')) => text[2..]
            .find('\'')
            .map_or(1, |at| at + 3)
            .max(if text[2..].starts_with('\'') { 4 } else { 0 }),
        Some(_) => letters
            .next()
            .filter(|(_, letter)| *letter == '\'')
            .map_or(1, |(at, _)| at + 1),
        None => 1,
    }
}
