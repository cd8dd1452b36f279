// What a request's text and the texts before it suggest as its continuation.
// Knows automata (suffix.h) and stores (suffix_store.h). Does not know requests, who sets budgets, or Python. What it means, and where it comes
// from: src/forerun/kernels/suffix_reference.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "suffix.h"
#include "suffix_store.h"

namespace forerun {

// What followed the latest earlier occurrence of a tail of `length` tokens; 0: there is none.
struct SuffixCopy {
    int32_t length = 0;
    std::vector<int32_t> tokens;
};

struct SuffixGuess {
    int32_t parent, token;  // parent: index among the guesses, -1 for the root
    double chance;          // of the whole path
};

// The newest of many texts: a second automaton starts when the first is half full, and takes over when it is full.
class SuffixCorpus {
   public:
    SuffixCorpus(int64_t max_tokens, int32_t window);

    void add(const std::vector<int32_t>& tokens);
    int64_t num_tokens() const { return now_->size(); }
    const SuffixAutomaton& automaton() const { return *now_; }
    int64_t num_added() const { return num_added_; }

   private:
    int64_t max_tokens_, num_added_ = 0;
    std::unique_ptr<SuffixAutomaton> now_, next_;
};

class SuffixText {
   public:
    SuffixText(int32_t window, const SuffixCorpus* corpus, const SuffixStore* store)
        : automaton_(window), corpus_(corpus), store_(store) {}

    int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
    void extend(const std::vector<int32_t>& tokens);
    SuffixCopy copy(int32_t shortest, int32_t longest, int32_t num) const;
    std::vector<SuffixGuess> grow(int32_t max_nodes, double least);

   private:
    SuffixMatch corpus_match();

    SuffixAutomaton automaton_;
    const SuffixCorpus* corpus_;  // nullptr: none
    const SuffixStore* store_;    // nullptr: none
    std::vector<int32_t> tokens_;
    // Where the end of the first num_followed_ tokens is found in the corpus of num_added_ texts.
    SuffixMatch followed_;
    size_t num_followed_ = 0;
    int64_t num_added_ = 0;
};

}  // namespace forerun
