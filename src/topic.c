/*
 * topic.c
 *		AMQP topic patterns: words between dots, * is exactly one word, # any number of
 *		them, none included.
 *
 * Pure functions on text.  A pattern is checked where it comes in (topic_check()), so
 * that in a pattern * and # are whole words; a name may contain anything, empty words
 * and the two signs included.
 *
 * Only the last # that was met can have to take more words: an earlier one has already
 * found what follows it.  So matching is a loop and cannot become exponential.
 */
#include "subscription.h"

#define MAX_WORDS	(OUTBOX_MAX_NAME + 1)

typedef struct Word
{
	const char *start;
	int			length;
} Word;

static Word word_at(const char *text);
static const char *word_after(const char *text);
static bool word_is(Word word, char sign);
static bool word_is_wild(Word word);
static bool words_equal(Word a, Word b);
static bool words_agree(Word a, Word b);
static int	split_words(const char *text, Word *words);

static Word
word_at(const char *text)
{
	Word		word = {text, strcspn(text, ".")};

	return word;
}

/* The rest behind the first word, or NULL where that was the last. */
static const char *
word_after(const char *text)
{
	const char *dot = strchr(text, '.');

	return dot != NULL ? dot + 1 : NULL;
}

static bool
word_is(Word word, char sign)
{
	return word.length == 1 && word.start[0] == sign;
}

static bool
word_is_wild(Word word)
{
	return word_is(word, '*') || word_is(word, '#');
}

static bool
words_equal(Word a, Word b)
{
	return a.length == b.length && memcmp(a.start, b.start, a.length) == 0;
}

/* Whether one word can match both; neither is #. */
static bool
words_agree(Word a, Word b)
{
	return word_is(a, '*') || word_is(b, '*') || words_equal(a, b);
}

bool
topic_matches(const char *pattern, const char *name)
{
	bool		can_return = false;
	const char *pattern_return = NULL;	/* behind the last # */
	const char *name_return = NULL; /* first word that this # has not taken */

	while (name != NULL)
	{
		Word		expected = word_at(pattern != NULL ? pattern : "");

		if (pattern != NULL && word_is(expected, '#'))
		{
			pattern = word_after(pattern);
			if (pattern == NULL)
				return true;
			can_return = true;
			pattern_return = pattern;
			name_return = name;
		}
		else if (pattern != NULL &&
				 (word_is(expected, '*') || words_equal(expected, word_at(name))))
		{
			pattern = word_after(pattern);
			name = word_after(name);
		}
		else if (can_return)
		{
			name_return = word_after(name_return);
			name = name_return;
			pattern = pattern_return;
		}
		else
			return false;
	}
	while (pattern != NULL && word_is(word_at(pattern), '#'))
		pattern = word_after(pattern);
	return pattern == NULL;
}

void
topic_check(const char *pattern)
{
	for (const char *rest = pattern; rest != NULL; rest = word_after(rest))
	{
		Word		word = word_at(rest);

		if (word.length == 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("pattern \"%s\" has an empty word", pattern),
					 errdetail("Words are separated by single dots."),
					 errhint("Write patterns like order.created, order.* or order.#.")));
		if (word.length > 1 && (memchr(word.start, '*', word.length) != NULL ||
								memchr(word.start, '#', word.length) != NULL))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("pattern \"%s\" has a wildcard inside a word", pattern),
					 errdetail("* stands for one whole word and # for any number of whole words."),
					 errhint("Write patterns like order.created, order.* or order.#.")));
	}
}

bool
topic_is_exact(const char *pattern)
{
	for (const char *rest = pattern; rest != NULL; rest = word_after(rest))
	{
		if (word_is_wild(word_at(rest)))
			return false;
	}
	return true;
}

int
topic_literal_words(const char *pattern)
{
	int			n = 0;

	for (const char *rest = pattern; rest != NULL; rest = word_after(rest))
		n += word_is_wild(word_at(rest)) ? 0 : 1;
	return n;
}

static int
split_words(const char *text, Word *words)
{
	int			n = 0;

	for (const char *rest = text; rest != NULL && n < MAX_WORDS; rest = word_after(rest))
		words[n++] = word_at(rest);
	return n;
}

/*
 * Whether some name matches both patterns: line[j] says so of what is left of a from
 * word i on and of b from word j on, next[j] of a from word i + 1 on.
 */
bool
topics_overlap(const char *a, const char *b)
{
	Word		a_words[MAX_WORDS];
	Word		b_words[MAX_WORDS];
	int			n_a = split_words(a, a_words);
	int			n_b = split_words(b, b_words);
	bool		line[MAX_WORDS + 1];
	bool		next[MAX_WORDS + 1];

	line[n_b] = true;
	for (int j = n_b - 1; j >= 0; j--)
		line[j] = line[j + 1] && word_is(b_words[j], '#');
	for (int i = n_a - 1; i >= 0; i--)
	{
		memcpy(next, line, sizeof(line));
		line[n_b] = next[n_b] && word_is(a_words[i], '#');
		for (int j = n_b - 1; j >= 0; j--)
		{
			if (word_is(a_words[i], '#') || word_is(b_words[j], '#'))
				line[j] = next[j] || line[j + 1];
			else
				line[j] = next[j + 1] && words_agree(a_words[i], b_words[j]);
		}
	}
	return line[0];
}
