//! Prose: doc comments begin with a noun phrase or a verb, comments, texts and documents avoid words
//! that say little, and pages have short sentences.

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

/// Phrases that pages do not contain, besides those, with what to write instead.
const PAGE_PHRASES: [(&str, &str); 11] = [
    ("alone", "only"),
    ("as ever", "the same as without"),
    ("folder", "directory"),
    ("folders", "directories"),
    ("gathered weights", "unsharded parameters"),
    ("mesh dim", "mesh dimension"),
    ("mesh dims", "mesh dimensions"),
    ("that of", "the noun again, or a possessive"),
    ("those of", "the noun again, or a possessive"),
    ("to the bit", "bit for bit, bit-identical"),
    ("without elements", "empty"),
];

/// The most words of a sentence in the book, without code.
const MOST_WORDS: usize = 45;

/// Files that still contain such words, and are going to be replaced.
const EXCEPTIONS: [&str; 0] = [];

/// Pages that still contain such phrases or long sentences, and are being rewritten.
const UNFINISHED_PAGES: [&str; 0] = [];

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
fn pages_avoid_habits() {
    let mut found = Vec::new();
    for (name, text) in finished_pages() {
        for (line, text) in paragraphs(&text) {
            found.extend(habits(&text).map(|fault| format!("{name}:{line}: {fault}")));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn sentences_of_the_book_are_short() {
    let mut found = Vec::new();
    for (name, text) in finished_pages() {
        if !name.starts_with("docs/") {
            continue;
        }
        for (line, sentence) in sentences(&text) {
            let count = words(&sentence);
            if count > MOST_WORDS {
                found.push(format!("{name}:{line}: {count} words: {sentence}"));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn habits_are_found_and_words_counted() {
    let page = concat!(
        "# As ever, alone\n\nEqual to\nthe bit, in `a folder`:\n\n```text\nmesh dim\n```\n",
        "| that of | folder |\n|---|---|\n",
    );
    let found: Vec<_> = paragraphs(page)
        .iter()
        .flat_map(|(line, text)| habits(text).map(|fault| (*line, fault)))
        .collect();
    let expected = [
        (1, "write only for `alone`"),
        (1, "write the same as without for `as ever`"),
        (3, "write bit for bit, bit-identical for `to the bit`"),
        (9, "write directory for `folder`"),
        (9, "write the noun again, or a possessive for `that of`"),
    ];
    assert_eq!(
        found,
        expected.map(|(line, fault)| (line, fault.to_owned()))
    );

    let page = concat!(
        "# Two words\n\nOne of\nfive `f(x, y)` words. (Two .. \nmore!) \"Is it?\"\n- item 0.5: `a` - *three.*\n",
        "  Two [words](a.md).\n\n| a | table |\n\n```text\nno words\n```\nA [link `x`](b.md) ends `here`\n[b.md]: b.md\n",
    );
    let counts: Vec<_> = sentences(page)
        .iter()
        .map(|(line, sentence)| (*line, words(sentence)))
        .collect();
    assert_eq!(counts, [(3, 4), (3, 2), (3, 2), (6, 3), (6, 2), (14, 3)]);
    let long = "word ".repeat(MOST_WORDS + 1);
    assert_eq!(words(&sentences(&long)[0].1), MOST_WORDS + 1);
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

/// Returns the names and texts of the pages of the book, the README and the changelog, except
/// [`UNFINISHED_PAGES`].
fn finished_pages() -> Vec<(String, String)> {
    let root = crate::root();
    let mut finished = Vec::new();
    for page in pages::all(&root) {
        let name = page.strip_prefix(&root).expect("inside").display();
        let name = name.to_string();
        if name != "CONTRIBUTING.md" && !UNFINISHED_PAGES.contains(&name.as_str()) {
            finished.push((name, fs::read_to_string(&page).expect("a page")));
        }
    }
    finished
}

/// Returns what to write instead of the retired words and phrases of a text, code in backticks
/// aside.
fn retired(text: &str) -> impl Iterator<Item = String> {
    instead_of(text, RETIRED_WORDS.into_iter().chain(RETIRED_PHRASES))
}

/// Returns what to write instead of the habits of a page's text, code in backticks aside.
fn habits(text: &str) -> impl Iterator<Item = String> {
    instead_of(text, PAGE_PHRASES.into_iter())
}

/// Returns what to write instead of those phrases that a text contains outside backticks.
fn instead_of(
    text: &str,
    phrases: impl Iterator<Item = (&'static str, &'static str)>,
) -> impl Iterator<Item = String> {
    let plain = without_code(text).to_lowercase();
    let words: Vec<&str> = plain
        .split(|letter: char| !letter.is_alphanumeric() && !"'-_".contains(letter))
        .collect();
    let words: Vec<_> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let plain = format!(" {} ", words.join(" "));
    phrases
        .filter(move |(word, _)| plain.contains(&format!(" {word} ")))
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

/// Returns the sentences of a page, with the lines on which their paragraphs begin, without code,
/// tables, headings and definitions of links. An item of a list is a paragraph.
fn sentences(page: &str) -> Vec<(usize, String)> {
    let (mut all, mut is_code, mut is_open) = (Vec::<(usize, String)>::new(), false, false);
    for (line, text) in page.lines().enumerate() {
        let text = text.trim();
        let is_fence = text.starts_with("```");
        is_code ^= is_fence;
        let is_definition = text.starts_with('[') && text.contains("]: ");
        let is_prose = !text.is_empty() && !text.starts_with(['|', '#']) && !is_definition;
        if is_code || is_fence || !is_prose {
            is_open = false;
            continue;
        }
        match all.last_mut() {
            Some((_, before)) if is_open && !is_item(text) => *before = format!("{before} {text}"),
            _ => all.push((line + 1, text.to_owned())),
        }
        is_open = true;
    }
    all.iter()
        .flat_map(|(line, text)| split_sentences(text).map(|sentence| (*line, sentence)))
        .collect()
}

/// Returns true if the line of a page begins an item of a list.
fn is_item(text: &str) -> bool {
    let marker = text.split(' ').next().expect("a first part");
    let number = marker.strip_suffix('.').unwrap_or("");
    ["-", "*"].contains(&marker) || number.parse::<usize>().is_ok()
}

/// Splits a paragraph into its sentences, without code in backticks. A number of a list is not a
/// sentence.
fn split_sentences(text: &str) -> impl Iterator<Item = String> {
    let (mut all, mut sentence) = (Vec::new(), Vec::new());
    let plain = without_code(text);
    for word in plain.split_whitespace() {
        sentence.push(word);
        let last = word.trim_end_matches([')', ']', '"', '*', '_']);
        let ends = last.ends_with(['.', '!', '?']) && !last.ends_with("..");
        if ends
            && sentence
                .iter()
                .any(|word| word.contains(char::is_alphabetic))
        {
            all.push(sentence.join(" "));
            sentence.clear();
        }
    }
    if !sentence.is_empty() {
        all.push(sentence.join(" "));
    }
    all.into_iter()
}

/// Returns the number of words, without code, targets of links and lone punctuation.
fn words(sentence: &str) -> usize {
    sentence
        .split_whitespace()
        .filter_map(|word| word.split("](").next())
        .filter(|word| word.contains(char::is_alphanumeric))
        .count()
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
