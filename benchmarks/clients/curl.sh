# curl: what people paste from documentation. One line for each thing tried (see tour.py).
key="Authorization: Bearer $TOUR_KEY"
try() { if printf '%s' "$2" | grep -q "$3"; then printf 'ok\t%s\n' "$1"; else printf 'FAIL\t%s\t%s\n' "$1" "$(printf '%s' "$2" | head -c 200 | tr '\n\t' '  ')"; fi; }
chat="{\"model\": \"$TOUR_MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"max_tokens\": 5}"
try "chat" "$(curl -s -H "$key" -H 'Content-Type: application/json' -d "$chat" "$TOUR_URL/v1/chat/completions")" '"choices"'
try "streams" "$(curl -sN -H "$key" -H 'Content-Type: application/json' -d "${chat%\}}, \"stream\": true}" "$TOUR_URL/v1/chat/completions")" 'DONE'
try "models" "$(curl -s -H "$key" "$TOUR_URL/v1/models/$TOUR_MODEL")" '"id"'
try "health without a key" "$(curl -s "$TOUR_URL/health")" '"status"'
try "no key is refused" "$(curl -s "$TOUR_URL/v1/models")" 'authentication_error'
