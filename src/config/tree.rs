//! A YAML document as a tree in which every key and value knows its place.
//!
//! Faults that leave the rest readable (a key given twice, a variable that is
//! not set) are collected and their nodes marked as broken; only broken syntax
//! ends the reading.

use std::cell::Cell;

use serde_saphyr::granit_parser::{Event, Options, Parser, ScalarStyle, ScanError, Span, StrInput};

use super::env;
use super::problem::{Place, Problem};
use crate::settings::PathSegment;

/// Deeper nesting than any configuration has would only exhaust the stack.
const MAX_DEPTH: usize = 64;

/// One value of the document.
#[derive(Debug)]
pub(super) struct Node {
    /// From the top, such as `limits[2].rate`.
    pub path: String,
    pub place: Place,
    /// The place of the key in front of it, if it is a map's value.
    pub key_place: Option<Place>,
    pub content: Content,
    /// Set once a problem with this value is known: it is then passed over.
    pub broken: Cell<bool>,
}

#[derive(Debug)]
pub(super) enum Content {
    /// An empty plain scalar, `~` or `null`.
    Null,
    Scalar(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

impl Node {
    /// The value of the field `name`, broken or not.
    pub(super) fn field(&self, name: &str) -> Option<&Self> {
        match &self.content {
            Content::Map(fields) => fields.iter().find(|(key, _)| key == name).map(|(_, n)| n),
            Content::Null | Content::Scalar(_) | Content::List(_) => None,
        }
    }

    /// The elements of a list that are not broken.
    pub(super) fn elements(&self) -> impl Iterator<Item = &Self> {
        let list = match &self.content {
            Content::List(list) => list.as_slice(),
            Content::Null | Content::Scalar(_) | Content::Map(_) => &[],
        };
        list.iter().filter(|node| !node.broken.get())
    }

    /// Whether it or anything in it is broken.
    pub(super) fn is_tainted(&self) -> bool {
        self.broken.get()
            || match &self.content {
                Content::Null | Content::Scalar(_) => false,
                Content::List(list) => list.iter().any(Self::is_tainted),
                Content::Map(fields) => fields.iter().any(|(_, node)| node.is_tainted()),
            }
    }

    /// The value that `segment` leads to. Indices count elements that are not
    /// broken, which are those that were decoded.
    fn step(&self, segment: PathSegment) -> Option<&Self> {
        match segment {
            PathSegment::Field(name) => self.field(name),
            PathSegment::Index(index) => self.elements().nth(index),
        }
    }

    /// Whether the value that `path` leads to was refused already, or part of it.
    pub(super) fn is_refused(&self, path: &[PathSegment]) -> bool {
        let Some((first, rest)) = path.split_first() else { return self.is_tainted() };
        self.broken.get() || self.step(*first).is_some_and(|node| node.is_refused(rest))
    }

    /// A problem with this value.
    pub(super) fn problem(&self, message: impl Into<String>) -> Problem {
        Problem { place: Some(self.place), path: self.path.clone(), message: message.into() }
    }

    /// A problem with what `path` leads to from here, placed at the nearest
    /// value that the file does have.
    pub(super) fn problem_at(&self, path: &[PathSegment], message: impl Into<String>) -> Problem {
        if let Some((first, rest)) = path.split_first()
            && let Some(node) = self.step(*first)
        {
            return node.problem_at(rest, message);
        }
        let mut problem = self.problem(message);
        for segment in path {
            problem.path = match segment {
                PathSegment::Field(name) => join(&problem.path, name),
                PathSegment::Index(index) => format!("{}[{index}]", problem.path),
            };
        }
        problem
    }
}

/// `parent.field`.
pub(super) fn join(parent: &str, field: &str) -> String {
    if parent.is_empty() { field.to_owned() } else { format!("{parent}.{field}") }
}

/// Reads `text`. Problems that leave the rest readable are added to `problems`.
///
/// # Errors
/// If the syntax is broken.
pub(super) fn parse(
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
    problems: &mut Vec<Problem>,
) -> Result<Node, Problem> {
    let mut options = Options::default();
    options.emit_comments = false;
    let parser = Parser::new_from_str_with_options(text, options);
    let mut builder = Builder { parser, env, problems };
    let mut root = None;
    while let Some((event, span)) = builder.next()? {
        if is_frame(&event) {
            continue;
        }
        if root.is_some() {
            return Err(syntax(place(span), "a second document; the file must have only one"));
        }
        root = Some(builder.node(event, span, String::new(), None, 0)?);
    }
    Ok(root.unwrap_or(Node {
        path: String::new(),
        place: Place { line: 1, column: 1 },
        key_place: None,
        content: Content::Null,
        broken: Cell::new(false),
    }))
}

/// Whether the event only says where documents begin and end.
fn is_frame(event: &Event<'_>) -> bool {
    matches!(
        event,
        Event::StreamStart | Event::StreamEnd | Event::DocumentStart(..) | Event::DocumentEnd
    )
}

struct Builder<'a> {
    parser: Parser<'a, StrInput<'a>>,
    env: &'a dyn Fn(&str) -> Option<String>,
    problems: &'a mut Vec<Problem>,
}

impl<'a> Builder<'a> {
    fn next(&mut self) -> Result<Option<(Event<'a>, Span)>, Problem> {
        self.parser.next().transpose().map_err(|error: ScanError| {
            let marker = error.marker();
            let place = Place { line: marker.line().max(1), column: marker.col() + 1 };
            syntax(place, format!("not valid YAML: {}", error.info()))
        })
    }

    /// The event inside an open list or map.
    fn inner(&mut self, open: Place) -> Result<(Event<'a>, Span), Problem> {
        self.next()?.ok_or_else(|| syntax(open, "not valid YAML: the file ends inside this value"))
    }

    fn node(
        &mut self,
        event: Event<'a>,
        span: Span,
        path: String,
        key_place: Option<Place>,
        depth: usize,
    ) -> Result<Node, Problem> {
        let place = place(span);
        if depth > MAX_DEPTH {
            return Err(syntax(place, format!("nested more than {MAX_DEPTH} deep")));
        }
        let tagged = event.tag().is_some();
        let mut fault = tagged.then(|| "YAML tags are not supported".to_owned());
        let content = if let Event::Scalar(text, style, ..) = event {
            let plain = style == ScalarStyle::Plain;
            if plain && matches!(&*text, "" | "~" | "null" | "Null" | "NULL") {
                Content::Null
            } else {
                match env::substitute(&text, self.env) {
                    Ok(text) => Content::Scalar(text.into_owned()),
                    Err(error) => {
                        fault = Some(error.to_string());
                        Content::Null
                    }
                }
            }
        } else if let Event::SequenceStart(..) = event {
            self.list(place, &path, depth)?
        } else if let Event::MappingStart(..) = event {
            self.map(place, &path, depth)?
        } else if let Event::Alias(_) = event {
            fault = Some("YAML aliases are not supported: write the value out".to_owned());
            Content::Null
        } else {
            return Err(syntax(place, "not valid YAML: a value was expected"));
        };
        let node = Node { path, place, key_place, content, broken: Cell::new(fault.is_some()) };
        if let Some(fault) = fault {
            self.problems.push(node.problem(fault));
        }
        Ok(node)
    }

    fn list(&mut self, open: Place, path: &str, depth: usize) -> Result<Content, Problem> {
        let mut list = Vec::new();
        loop {
            let (event, span) = self.inner(open)?;
            if event == Event::SequenceEnd {
                return Ok(Content::List(list));
            }
            let path = format!("{path}[{}]", list.len());
            list.push(self.node(event, span, path, None, depth + 1)?);
        }
    }

    fn map(&mut self, open: Place, path: &str, depth: usize) -> Result<Content, Problem> {
        let mut fields: Vec<(String, Node)> = Vec::new();
        loop {
            let (event, span) = self.inner(open)?;
            let key_place = place(span);
            if event == Event::MappingEnd {
                return Ok(Content::Map(fields));
            }
            let Event::Scalar(key, ..) = event else {
                return Err(syntax(key_place, "the key of a map must be plain text"));
            };
            let key = key.into_owned();
            let (event, span) = self.inner(open)?;
            let path = join(path, &key);
            let node = self.node(event, span, path, Some(key_place), depth + 1)?;
            match fields.iter().find(|(name, _)| *name == key) {
                None => fields.push((key, node)),
                Some((_, first)) => {
                    let first = first.key_place.unwrap_or(first.place);
                    let message = format!(
                        "given twice; first in line {} column {}",
                        first.line, first.column
                    );
                    self.problems.push(Problem { place: Some(key_place), ..node.problem(message) });
                }
            }
        }
    }
}

fn place(span: Span) -> Place {
    Place { line: span.start.line().max(1), column: span.start.col() + 1 }
}

fn syntax(place: Place, message: impl Into<String>) -> Problem {
    Problem { place: Some(place), path: String::new(), message: message.into() }
}
