# Whatever fails from here on gives the instance up at once, in one sentence: its group tries another one, and need not
# wait until the lifecycle hook's time is over. The log is delivered before: an abandoned instance is terminated within
# seconds.

# Ends the boot with the sentence $1, which may quote lines of a program, and the exit code $2.
fail() {
    local cause="this instance is given up: ${1//$'\n'/; }"
    trap - ERR
    report "$cause"
    deliver "$cause" || report "the log group $LOG does not have these lines; see the console output of the instance"
    abandon || report "hook $HOOK is not completed here; it ends the instance when its time is over"
    exit "${2:-1}"
}
trap 'fail "line $LINENO of the user data ended with $?; see the lines before this one" $?' ERR

abandon() {
    aws autoscaling complete-lifecycle-action --region "$REGION" --lifecycle-action-result ABANDON \
        --lifecycle-hook-name "$HOOK" --instance-id "$(about_me instance-id)" \
        --auto-scaling-group-name "$(about_me tags/instance/aws:autoscaling:groupName)"
}

require() {
    local program missing=
    for program; do
        command -v "$program" > /dev/null || missing+=${missing:+, }$program
    done
    [ -z "$missing" ] || fail "this image has no $missing on the PATH of root; use an image that has it"
}

put() {
    mkdir -p "$(dirname "$1")"
    printf '%s' "$2" > "$1"
}
