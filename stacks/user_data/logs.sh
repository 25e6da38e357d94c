# What a failed boot leaves to look at: its reports on the console, which EC2's GetConsoleOutput returns, and the end of
# its error output in the fleet's log group.

recorded=

report() {
    echo "nxpipe: $1" >&2
    [ -n "$recorded" ] || { echo "nxpipe: $1" >> "$OUTPUT"; } 2> /dev/null || true
    { echo "nxpipe: $1" >> "$CONSOLE"; } 2> /dev/null || true
}

record() {
    exec 2> >(tee -a "$OUTPUT" >&2)
    recorded=1
}

about_me() {
    local service=http://169.254.169.254/latest token
    token=$(curl -sSf --max-time 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$service/api/token")
    curl -sSf --max-time 5 -H "X-aws-ec2-metadata-token: $token" "$service/meta-data/$1"
}

# Events of CloudWatch Logs in JSON, one a line. Other characters than printable ASCII become question marks.
events() {
    local line now separator='[' quote='"' backslash=$'\\'
    printf -v now '%(%s)T000' -1
    tail -n 200 "$OUTPUT" | LC_ALL=C tr -c '\n -~' '?' | while IFS= read -r line; do
        [ -n "$line" ] || continue
        line=${line:0:4000}
        line=${line//"$backslash"/"$backslash$backslash"}
        line=${line//"$quote"/"$backslash$quote"}
        printf '%s{"timestamp": %s, "message": "%s"}' "$separator" "$now" "$line"
        separator=','
    done || return
    printf ']'
}

# Delivers the end of the output, at least up to the report $1, as the stream INSTANCE/boot. It takes a minute at most.
deliver() {
    local left file instance log
    for ((left = 20; left > 0; left--)); do # `tee` writes it a moment later
        case "$(tail -n 20 "$OUTPUT")" in *"nxpipe: $1"*) break ;; esac
        sleep 0.1 || true
    done
    instance=$(about_me instance-id) || return
    file=$(mktemp) || return
    events > "$file" || return
    log=(--region "$REGION" --cli-connect-timeout 5 --log-group-name "$LOG" --log-stream-name "$instance/boot")
    timeout 20 aws logs create-log-stream "${log[@]}" || true # a former boot may have created it
    timeout 20 aws logs put-log-events "${log[@]}" --log-events "file://$file" > /dev/null || return
    rm "$file"
}
